"""Past Triton's Python, its launcher in C gets the same; whoever listens to Triton is noticed."""

from __future__ import annotations

import os
import types
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are stand-ins here, not interpreted", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from keel._versions import c_launcher
from keel.kernels import launch


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
@pytest.mark.parametrize("described", [False, True])
def test_the_launcher_in_c_gets_what_triton_gives_it(
    version: str, described: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """`print` stands for the launcher: both ways must say the same but for hooks and metadata."""
    import triton
    from triton.backends.nvidia import driver

    monkeypatch.setattr(triton, "__version__", version)
    launcher = object.__new__(driver.CudaLauncher)
    kind = "tensordesc<fp16[64,64]>" if described else "*fp16"
    signature = {"A": kind, "n": "i32"}
    form = {"swizzle": 3}
    metas = [form] if described else []
    vars(launcher).update(
        global_scratch_size=0,
        profile_scratch_size=0,
        launch_cooperative_grid=False,
        launch_pdl=True,
        arg_annotations="annotations",
        kernel_signature="signature",
        launch=driver.wrap_handle_tensordesc(print, signature, metas),
    )
    compiled = types.SimpleNamespace(
        run=launcher,
        function="handle",
        packed_metadata="metadata",
        metadata=types.SimpleNamespace(tensordesc_meta=metas),
        src=types.SimpleNamespace(signature=signature),
    )
    fast = c_launcher(compiled, (4, 2, 1))
    assert fast is not None and list(fast.forms) == metas
    fast.run(7, ["x", 3])
    options = "4 2 1 7 handle False True"
    expected = {
        "3.6.0": f"{options} None None metadata None None None x 3\n",
        "3.7.1": f"{options} metadata None None None None None annotations signature ['x', 3]\n",
    }
    assert capsys.readouterr().out == expected[version]
    for change in ({"global_scratch_size": 8}, {"launch": launch.launch}):
        other = object.__new__(driver.CudaLauncher)
        vars(other).update({**vars(launcher), **change})
        compiled.run = other
        assert c_launcher(compiled, (4, 2, 1)) is None
    compiled.run = launcher
    monkeypatch.setattr(triton, "__version__", "9.0.0")
    assert c_launcher(compiled, (4, 2, 1)) is None


def test_hooks_of_triton_are_noticed() -> None:
    from triton import knobs

    from keel._versions import has_launch_hooks

    assert not has_launch_hooks()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(knobs.runtime, name)
        chain.add(print)
        try:
            assert has_launch_hooks()
        finally:
            chain.remove(print)
    assert not has_launch_hooks()
