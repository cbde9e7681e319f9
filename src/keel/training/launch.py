"""Ranks as processes of this machine: started, watched, and ended with who started them."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from keel.training import checkpoint
from keel.training.config import RUNS, TrainConfig
from keel.training.run import run_on_rank

HOST = "127.0.0.1"
SILENCE = 300.0
"""Seconds after which a rank that says nothing is given up."""


ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""For ranks: they share the cores, and sums keep their order. Some libraries of linear algebra read
it when they are loaded and never look at torch.set_num_threads."""


class RunFailed(Exception):
    """A rank failed or died. What was saved is whole, and a new run goes on from there."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A step that is done."""

    run: str
    step: int
    """Steps done, of those of the config."""
    loss: float
    max_logit: float
    clipped: int
    """Heads past tau."""


@dataclass(frozen=True, slots=True)
class _Job:
    config: TrainConfig
    folder: Path
    save_every: int
    port: int
    use_gpus: bool


def train(
    config: TrainConfig,
    folder: Path,
    on_step: Callable[[Progress], None] = lambda progress: None,
    *,
    save_every: int = 10,
    fresh: bool = False,
) -> dict[str, dict[str, Any]]:
    """Makes both runs on `config.num_ranks` ranks; goes on from checkpoints in the folder.

    Ranks are processes, on GPUs with NCCL where there is one for each, else on CPUs with gloo.

    Args:
        on_step: called after each step.
        save_every: steps between two checkpoints; it does not change any number.
        fresh: start over.

    Returns:
        By run: "history", as in `TrainingRun`, and "digest".
    """
    if save_every < 1:
        raise ValueError(f"save_every must be at least 1 step, got {save_every}")
    folder.mkdir(parents=True, exist_ok=True)
    with checkpoint.only_writer(folder):
        for name in RUNS:
            path = folder / f"{name}.pt"
            checkpoint.temporary(path).unlink(missing_ok=True)
            if fresh:
                path.unlink(missing_ok=True)
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    use_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= config.num_ranks
    job = _Job(config, folder, save_every, store.port, use_gpus)
    with _ranks(job) as pipes:
        return _listen(pipes, on_step)


@contextlib.contextmanager
def _ranks(job: _Job) -> Iterator[list[Connection]]:
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:  # torch is imported once, not once per rank
        context.set_forkserver_preload(["keel.training"])
    pipes, processes = [], []
    try:
        for rank in range(job.config.num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(theirs, rank, job), daemon=True)
            with mock.patch.dict(os.environ, ONE_THREAD):
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _listen(
    pipes: list[Connection], on_step: Callable[[Progress], None]
) -> dict[str, dict[str, Any]]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + SILENCE
    while open_pipes and not errors:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RunFailed(f"no rank has said anything for {SILENCE:.0f} s")
        deadline = time.monotonic() + SILENCE
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionError):
                del open_pipes[pipe]
                if rank not in results:
                    errors[rank] = "died"
                continue
            if kind == "step":
                on_step(value)
            elif kind == "done":
                results[rank] = value
            else:
                errors[rank] = value
    if errors:
        _raise(errors, open_pipes)
    return results[0]


def _raise(errors: dict[int, str], open_pipes: dict[Connection, int]) -> None:
    """The first to fail is not always the first heard of: others may only have lost it."""
    for pipe in wait(list(open_pipes), timeout=1.0):
        assert isinstance(pipe, Connection)
        with contextlib.suppress(EOFError, ConnectionError):
            kind, value = pipe.recv()
            if kind in ("refused", "failed"):
                errors.setdefault(open_pipes[pipe], value)
    rank, words = min(errors.items(), key=lambda item: (item[1] != "died", item[0]))
    if words.startswith("refused: "):
        raise ValueError(words.removeprefix("refused: "))
    raise RunFailed(f"rank {rank} {words}")


def _rank(pipe: Connection, rank: int, job: _Job) -> None:
    """A process's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is for the parent, which then ends us
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    try:
        with checkpoint.only_writer(job.folder) if rank == 0 else contextlib.nullcontext():
            pipe.send(("done", _all_runs(pipe, rank, job)))
    except ValueError as error:
        pipe.send(("failed", f"refused: {error}"))
    except BaseException:
        pipe.send(("failed", f"failed:\n{traceback.format_exc()}"))
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with(sentinel: int) -> None:
    """A parent that was killed cannot end its ranks: they see its pipe close."""
    wait([sentinel])
    os._exit(1)


def _all_runs(pipe: Connection, rank: int, job: _Job) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if job.use_gpus else torch.device("cpu")
    if job.use_gpus:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=SILENCE)
    dist.init_process_group(
        "nccl" if job.use_gpus else "gloo",
        store=TCPStore(HOST, job.port, timeout=timeout),
        rank=rank,
        world_size=job.config.num_ranks,
        timeout=timeout,
    )
    results = {}
    for name in RUNS:

        def report(step: int, loss: float, top: float, clips: int, name: str = name) -> None:
            pipe.send(("step", Progress(name, step, loss, top, clips)))

        made = run_on_rank(
            *(name, job.config, job.folder, device, report), save_every=job.save_every
        )
        # numpy, not torch: tensors would travel as files that end with this process
        history = {key: x.numpy() for key, x in made["history"].items()}
        results[name] = {"history": history, "digest": made["digest"]}
    return results
