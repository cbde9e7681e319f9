"""Reading GPU events out of Kineto traces of any size, without loading them.

A trace of a training step is mostly CPU events. The quick way searches the text for the
categories of GPU events and decodes only the objects around them: in the layout that Kineto
writes, the category stands before anything nested, so the object begins at the nearest brace on
the left. Every object found so is checked; at the first that is not an event, or when the end of
the file is not that of a trace, the file is read again object by object, which is slower and exact.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

CATEGORIES = {
    "kernel": "kernel",
    "gpu_memcpy": "gpu_memcpy",
    "gpu_memset": "gpu_memset",
    "gpu_user_annotation": "gpu_user_annotation",
    # as torch before 1.12 wrote them
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
}
"""What is read, and its name today. Waits (`cuda_sync`) occupy no GPU and are left out."""

KERNELS = ("kernel", "Kernel")

CHUNK = 1 << 23
MAX_EVENT = 1 << 24
"""An object that does not end within this many characters is damaged, not long."""
MAX_HEADER = 1 << 28
_TAIL = 1 << 16

_WANTED = re.compile(
    r'"cat"\s*:\s*"(' + "|".join(CATEGORIES) + r')"'
    # The rest of an event exactly as Kineto writes it.
    r'(?:\s*,\s*"name"\s*:\s*"([^"\\]*)"'
    r'\s*,\s*"pid"\s*:\s*\d+\s*,\s*"tid"\s*:\s*\d+'
    r'\s*,\s*"ts"\s*:\s*([\d.]+)\s*,\s*"dur"\s*:\s*([\d.]+)'
    r'\s*,\s*"args"\s*:\s*\{[^{}]*?"device"\s*:\s*(\d+)'
    r'[^{}]*?"stream"\s*:\s*(\d+)[^{}]*\})?'
)
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder(strict=False)  # Kineto lets control characters into names

Event = dict[str, Any]
Kernel = tuple[str, float, float, int, int]
"""(name, ts, dur, device, stream) of a kernel of which nothing else matters."""
Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes in all."""


class TraceError(ValueError):
    """A file that is not a usable trace; the message says what to do."""


class NoGpuWorkError(TraceError):
    """A whole trace without any GPU event."""


class _IrregularError(Exception):
    """The quick way does not apply."""


def scan(
    path: str | os.PathLike[str], progress: Progress | None = None
) -> tuple[dict[str, Any], Iterator[Event | Kernel | None]]:
    """(what the header says, GPU events of a .json or .json.gz trace).

    A None among the events takes back all that came before it: the file is being read again.
    """
    path = Path(path)
    if path.is_dir():
        raise TraceError(f"{path} is a folder: give the trace files in it")
    try:
        if path.stat().st_size == 0:
            raise TraceError(f"{path} is empty: was the program still writing, or was it killed?")
        _, _, header = _open_events(path, None)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from None
    return _header(header), _events(path, progress)


def _events(path: Path, progress: Progress | None) -> Iterator[Event | Kernel | None]:
    try:
        yield from _quick(path, progress)
    except _IrregularError:
        yield None
        yield from _one_by_one(path, progress)


def _text(path: Path, progress: Progress | None) -> Iterator[str]:
    """The text of the file in chunks, unpacked where it is packed, whatever its name says."""
    size = path.stat().st_size
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    with open(path, "rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
        try:
            while chunk := stream.read(CHUNK):
                yield decode(chunk)
                if progress is not None:
                    progress(raw.tell(), size)
        except EOFError:
            raise _truncated(path) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{path} is not a whole gzip file: {error}") from None


def _open_events(path: Path, progress: Progress | None) -> tuple[Iterator[str], str, str]:
    """(remaining chunks, text from the first event on, text before the events)."""
    chunks = _text(path, progress)
    text = ""
    for chunk in chunks:
        text += chunk
        found = _EVENTS.search(text)
        if found is not None:
            return chunks, text[found.end() :], text[: found.start()]
        if text.lstrip("\ufeff \t\r\n").startswith("["):  # the older form: a bare list of events
            return chunks, text.lstrip("\ufeff \t\r\n")[1:], ""
        if len(text) > MAX_HEADER:
            break
    if text.lstrip("\ufeff \t\r\n")[:1] != "{":
        raise TraceError(
            f"{path} is not a JSON trace: it begins with {text[:40]!r}; expected what "
            "torch.profiler's export_chrome_trace writes"
        )
    raise TraceError(
        f"{path} has no list of traceEvents: it is not a Kineto trace, or was cut off before them"
    )


def _header(text: str) -> dict[str, Any]:
    """What a trace says about its process, as far as it is there and readable."""
    seen: dict[str, Any] = {}
    for name in ("baseTimeNanoseconds", "distributedInfo", "deviceProperties", "host_name"):
        found = re.search(rf'"{name}"\s*:\s*', text)
        if found is not None:
            try:
                seen[name] = _DECODER.raw_decode(text, found.end())[0]
            except ValueError:
                continue
    return seen


def _quick(path: Path, progress: Progress | None) -> Iterator[Event | Kernel]:
    chunks, text, _ = _open_events(path, progress)
    tail = text[-_TAIL:]
    while True:
        done, cut = 0, False
        for found in _WANTED.finditer(text):
            if found.start() < done:
                continue
            category, name, ts, dur, device, stream = found.groups()
            if stream is not None and category in KERNELS and _is_plain(text, found):
                done = found.end()
                yield name, float(ts), float(dur), int(device), int(stream)
                continue
            start = text.rfind("{", done, found.start())
            if start < 0:
                raise _IrregularError
            try:
                event, done = _DECODER.raw_decode(text, start)
            except ValueError:
                if len(text) - start > MAX_EVENT:
                    raise _IrregularError from None
                cut = True
                break  # by the end of the chunk: once more with the next one
            if not _is_event(event):
                raise _IrregularError
            if event["ph"] == "X" and event["cat"] in CATEGORIES:
                yield event
        else:
            # The rest may hold the beginning of an event, up to before its category.
            start = max(text.rfind("{", done), done)
        chunk = next(chunks, None)
        if chunk is None:
            break
        tail = (tail + chunk)[-_TAIL:]
        text = text[start:] + chunk
    if cut or not _is_closed(tail):
        raise _IrregularError


def _is_plain(text: str, found: re.Match[str]) -> bool:
    """Whether nothing more is wanted of a kernel than what was found: it is no collective.

    Such an event need not be decoded, which would take several times longer.
    """
    start, end = found.span()
    return (
        text.find('"X"', max(start - 24, 0), start) >= 0
        and text.find('"Collective', found.end(4), end) < 0
    )


def _is_closed(tail: str) -> bool:
    """Whether the list of events ends after the last one."""
    start = tail.rfind("{", 0, max(tail.rfind('"ph"'), 0))
    if start < 0:
        return False
    try:
        event, end = _DECODER.raw_decode(tail, start)
    except ValueError:
        return False
    return _is_event(event) and tail[end:].lstrip()[:1] == "]"


def _one_by_one(path: Path, progress: Progress | None) -> Iterator[Event]:
    chunks, text, _ = _open_events(path, progress)
    at = 0
    while True:
        match = _BETWEEN.match(text, at)
        at = match.end() if match else at
        if text[at : at + 1] == "]":
            return
        try:
            event, at = _DECODER.raw_decode(text, at)
        except ValueError as error:
            if len(text) - at > MAX_EVENT:
                raise _malformed(path, text[at:], str(error)) from None
            chunk = next(chunks, None)
            if chunk is None:
                raise _unfinished(path, text[at:], error) from None
            text, at = text[at:] + chunk, 0
            continue
        if not isinstance(event, dict):
            raise _malformed(path, json.dumps(event), "an event must be an object")
        if event.get("ph") == "X" and event.get("cat") in CATEGORIES:
            if not _is_event(event):
                raise _malformed(path, json.dumps(event), "a GPU event must have ts and name")
            yield event


def _is_event(event: object) -> bool:
    """Whether this is an event and not something inside of one."""
    return (
        isinstance(event, dict)
        and isinstance(event.get("ph"), str)
        and (event["ph"] != "X" or {"cat", "ts", "name"} <= event.keys())
    )


def _unfinished(path: Path, rest: str, error: ValueError) -> TraceError:
    position = getattr(error, "pos", 0)
    if position < len(rest.rstrip()) and rest.rstrip()[-1:] in "}]" and "]" in rest:
        return _malformed(path, rest, str(error))
    return _truncated(path)


def _truncated(path: Path) -> TraceError:
    return TraceError(
        f"{path} ends in the middle of its events: it was cut off; export it again, and wait for "
        "export_chrome_trace to return before the program ends"
    )


def _malformed(path: Path, text: str, why: str) -> TraceError:
    return TraceError(f"{path} has a malformed event ({why}) at: {text[:80]!r}")
