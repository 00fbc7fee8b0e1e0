"""The MCP server, by the reference client of the `mcp` package over standard input and output."""

import asyncio
import importlib.util
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tpuport.foundation.errors import UsageError
from tpuport.servers.bounds import Bounds

# Without its import, which takes a second: each process collects all tests.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mcp") is None, reason="waits for mcp: pip install mcp"
)

LINTED = """
import torch


def forward(x: torch.Tensor):
    if x.sum() > 0:
        x = -x
    return x
"""
ENDLESS = """
import os, subprocess, sys, time

sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
open("pids", "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


def ask(folder: Path, talk: Callable[[Any], Awaitable[None]], *options: str) -> None:
    """Start a server for a folder and talk to it."""
    from mcp import Client, StdioServerParameters

    code = "from tpuport.cli.app import app; app()"
    started = StdioServerParameters(
        command=sys.executable,
        args=["-c", code, "mcp", str(folder), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )

    async def whole() -> None:
        async with Client(started) as client:
            await talk(client)

    asyncio.run(asyncio.wait_for(whole(), 200))


def text_of(result: Any) -> str:
    return "".join(part.text for part in result.content)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_an_agent_lints_and_is_kept_in_its_folder_and_its_time(tmp_path: Path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "model.py").write_text(LINTED)
    branches = "    if x.sum() > 0:\n        x = -x\n" * 40
    (folder / "long.py").write_text(LINTED.replace("    return x\n", f"{branches}    return x\n"))
    (folder / "endless.py").write_text(ENDLESS)
    (tmp_path / "secret.py").write_text(LINTED)
    (folder / "way_out.py").symlink_to(tmp_path / "secret.py")
    (folder / "way_round.py").symlink_to(folder / "model.py")

    async def talk(client: Any) -> None:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        assert tools == {"lint", "run", "verify", "verify_port", "compile"}

        found = await client.call_tool("lint", {"paths": ["model.py"]})
        assert not found.is_error
        assert found.structured_content["status"] == 1
        assert "model.py:6" in found.structured_content["output"]

        linked = await client.call_tool("lint", {"paths": ["way_round.py"]})
        assert "model.py:6" in linked.structured_content["output"]

        for path in ("../secret.py", str(tmp_path / "secret.py"), "way_out.py", "gone.py", "/"):
            for tool, arguments in (
                ("lint", {"paths": [path]}),
                ("run", {"script": path}),
                ("verify", {"script": path}),
                ("verify_port", {"spec": path}),
                ("compile", {"file": path, "function": "make"}),
            ):
                refused = await client.call_tool(tool, arguments)
                assert refused.is_error, (tool, path)
                assert "folder" in text_of(refused)

        long = await client.call_tool("lint", {"paths": ["long.py"]})
        assert "characters left out]" in long.structured_content["output"]
        assert len(long.structured_content["output"]) < 1100

        began = time.monotonic()
        ended = await client.call_tool("run", {"script": "endless.py", "seconds": 900})
        assert ended.structured_content["status"] is None
        assert "Stopped after 15 s" in ended.structured_content["errors"]
        assert time.monotonic() - began < 60
        # On a busy machine the script may not have begun; tests/repository/test_port.py waits.
        pids = folder / "pids"
        assert not pids.exists() or not any(is_running(int(p)) for p in pids.read_text().split())

        again = await client.call_tool("lint", {"paths": ["model.py"], "select": "TPU1"})
        assert again.structured_content["status"] == 1

    ask(folder, talk, "--seconds", "15", "--characters", "1000")


SPEC = """
import torch


def make():
    model = torch.nn.Linear(3, 4)
    weights = {"kernel": model.weight.detach().numpy().T, "bias": model.bias.detach().numpy()}

    def port(params, x):
        return x @ params["kernel"] - params["bias"]

    x = torch.ones(2, 3)
    return {"torch_model": model, "jax_function": port, "params": weights, "args": (x,)}
"""


# Starts three processes that import torch and jax; test_verify_port.py runs the comparison, and the
# test above the server.
@pytest.mark.slow
def test_an_agent_verifies_its_port(tmp_path: Path):
    (tmp_path / "spec.py").write_text(SPEC)
    (tmp_path / "script.py").write_text("import sys\nprint('arguments', sys.argv[1:])\n")

    async def talk(client: Any) -> None:
        found = await client.call_tool("verify_port", {"spec": "spec.py"})
        assert found.structured_content["status"] == 1
        assert '"failed_stage": "numbers"' in found.structured_content["output"]
        assert "- params[" in found.structured_content["output"]
        ran = await client.call_tool("run", {"script": "script.py", "arguments": ["--lr", "1"]})
        assert ran.structured_content["status"] == 0
        assert "arguments ['--lr', '1']" in ran.structured_content["output"]

    ask(tmp_path, talk)


def test_paths_stay_inside(tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/-o.py").write_text("")
    (tmp_path / "in/loop").symlink_to(tmp_path / "in/loop")
    bounds = Bounds(tmp_path / "in")
    assert bounds.path("-o.py") == "./-o.py"
    assert bounds.path(".") == "."
    for path in ("..", "loop", "a\0b", "../in2"):
        with pytest.raises(UsageError):
            bounds.path(path)


def test_long_output_says_that_it_is_shortened():
    bounds = Bounds(Path("."), characters=10)
    assert bounds.shortened("0123456789") == "0123456789"
    assert bounds.shortened("01234xx56789") == "01234\n[2 characters left out]\n56789"
