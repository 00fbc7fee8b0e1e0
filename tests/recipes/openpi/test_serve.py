"""The server: what openpi-client gets, what bad messages do, and how it ends."""

import asyncio
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.openpi.inputs import Prepared, stacked
from recipes.openpi.policy import PolicyOptions, load_policy
from recipes.openpi.serve import ServeOptions, Server
from recipes.openpi.weights import read_weights
from recipes.openpi.wire import pack, unpack
from tests.recipes.openpi.small import observation
from tpuport.foundation.errors import UsageError

msgpack = pytest.importorskip("msgpack", reason="waits for msgpack, of extra [openpi]")
sync = pytest.importorskip(
    "websockets.sync.client", reason="waits for websockets, of extra [openpi]"
)
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402

# openpi-client does so, too.
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as:DeprecationWarning")


class Echo:
    """In a policy's place: actions are the state, a second after `slow`, an error at `broken`."""

    def __init__(self) -> None:
        self.batch_sizes, self.metadata = (1, 3), {"robot": "echo"}
        self.sizes: list[int] = []
        self.hold = threading.Event()
        self.hold.set()
        self.begun = threading.Event()

    def compile(self) -> list[Any]:
        return []

    def prepare(self, observation: Mapping[str, Any]) -> Prepared:
        state = observation.get("state")
        if not isinstance(state, np.ndarray):
            raise UsageError("observation['state'] is missing")
        return Prepared(np.zeros(0), np.zeros(0), [], state, state)  # type: ignore[arg-type]

    def act(self, prepared: list[Prepared]) -> list[Any]:
        self.begun.set()
        assert self.hold.wait(20)
        self.sizes.append(len(prepared))
        if any((one.state == -1).all() for one in prepared):
            raise RuntimeError("broken on purpose")
        return [one.state[None] for one in prepared]


@contextmanager
def serving(policy: Any, **options: Any) -> Iterator[Server]:
    """A server in a thread, which is ended after the block."""
    found: list[Server] = []
    ready = threading.Event()

    async def main() -> None:
        server = Server(policy, ServeOptions(port=0, **options))
        found.append(server)
        loops.append(asyncio.get_running_loop())
        await server.run(lambda _: ready.set())

    loops: list[Any] = []
    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(60)
        yield found[0]
    finally:
        loops[0].call_soon_threadsafe(found[0].stop)
        thread.join(20)
        assert not thread.is_alive()


def connected(server: Server, **options: Any) -> Any:
    return sync.connect(f"ws://127.0.0.1:{server.port}", compression=None, **options)


def answer(socket: Any, message: Any) -> Any:
    socket.send(message)
    found = socket.recv(timeout=20)
    return found if isinstance(found, str) else unpack(found)


# -- messages ------------------------------------------------------------------------------------


def test_messages_come_back():
    message = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": {"c": np.bool_(True), "d": [np.int64(7), "x", None, 1.5]},
        "e": np.array("text"),
        "f": np.zeros((0, 3), np.uint8),
    }
    found = unpack(pack(message))
    np.testing.assert_array_equal(found["a"], message["a"])
    assert found["b"] == {"c": True, "d": [7, "x", None, 1.5]}
    assert found["e"].item() == "text"
    assert found["f"].shape == (0, 3)
    with pytest.raises(TypeError, match="cannot be sent"):
        pack({"a": np.array([object()])})


def _array(**change: Any) -> bytes:
    whole = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}
    return msgpack.packb({"a": {**whole, **{k.encode(): v for k, v in change.items()}}})


# Each with what the answer says.
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not msgpack"),
    "noise": (bytes(range(256)), "not msgpack"),
    "a pickle": (b"\x80\x04\x8c\x05posix\x94.", "not msgpack|no dict"),
    "cut off": (_array()[:-3], "not msgpack"),
    "a list": (msgpack.packb([1]), "no dict of names"),
    "numbers as names": (msgpack.packb({1: 2}), "not msgpack"),
    "nested deeply": (b"\x91" * 100_000 + b"\xc0", "not msgpack"),
    "a long list": (msgpack.packb({"a": [0] * 100_001}), "not msgpack"),
    "objects": (_array(dtype="|O"), "array of dtype"),
    "a record": (_array(dtype="f4,f4"), "array of dtype"),
    "a wrong dtype": (_array(dtype="(" * 10), "array of dtype"),
    "a long dtype": (_array(dtype="f" * 10**6), "array of dtype 'f{40}'"),
    "too few bytes": (_array(shape=[3]), "asks for 12"),
    "a huge shape": (_array(shape=[2**62, 2**62]), "asks for"),
    "a negative shape": (_array(shape=[-2, -1]), "without bytes or shape"),
    "no shape": (_array(shape="2"), "without bytes or shape"),
    "a number that is none": (
        msgpack.packb({"a": {b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"}}),
        "number that is none",
    ),
    "an extension": (msgpack.packb({"a": msgpack.ExtType(5, b"x")}), "not msgpack"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_message_is_named(case: str):
    data, message = BAD[case]
    with pytest.raises(UsageError, match=message):
        unpack(data)


# -- the server ----------------------------------------------------------------------------------


def test_two_hundred_requests_of_four_clients_with_bad_ones_among_them():
    policy, failures, good = Echo(), [], []

    def talk(number: int, connect: Callable[[], Any]) -> None:
        generator = np.random.default_rng(number)
        try:
            with connect() as socket:
                assert unpack(socket.recv())["robot"] == "echo"
                for index in range(50):
                    state = np.array([number, index], np.float32)
                    if generator.random() < 0.3:
                        bad, message = list(BAD.values())[generator.integers(len(BAD))]
                        assert isinstance(answer(socket, bad), str)
                        assert message
                    found = answer(socket, pack({"state": state}))
                    np.testing.assert_array_equal(found["actions"], state[None])
                    assert found["policy_timing"]["infer_ms"] >= 0
                    if index:
                        assert found["server_timing"]["prev_total_ms"] > 0
                    good.append((number, index))
        except BaseException as error:
            failures.append(error)

    with serving(policy, wait_ms=20) as server:
        threads = [
            threading.Thread(target=talk, args=(n, lambda: connected(server))) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures, failures
        assert sorted(good) == [(n, i) for n in range(4) for i in range(50)]
        assert server.answered == 200
    assert max(policy.sizes) == 3
    assert sum(policy.sizes) == 200


def test_errors_are_answered_and_the_next_observation_too():
    with serving(Echo()) as server, connected(server) as socket:
        socket.recv()
        assert "is a text" in answer(socket, "hello")
        assert answer(socket, pack({})) == "observation['state'] is missing"
        broken = answer(socket, pack({"state": np.full(2, -1.0)}))
        assert "failed to answer" in broken
        assert "on purpose" not in broken  # the log has it, the client does not
        nan = answer(socket, pack({"state": np.full(2, np.nan)}))
        assert nan == "the policy's actions are not finite numbers"
        assert answer(socket, pack({"state": np.ones(2)}))["actions"].shape == (1, 2)


def test_a_message_that_is_too_long_ends_its_own_connection_only():
    with serving(Echo(), max_message=1000) as server, connected(server) as other:
        other.recv()
        with connected(server) as socket:
            socket.recv()
            with pytest.raises(ConnectionClosed, match="1009"):
                answer(socket, pack({"state": np.zeros(1000)}))
        assert answer(other, pack({"state": np.ones(2)}))["actions"].shape == (1, 2)


def test_health_keys_and_the_limit_of_clients():
    with serving(Echo(), api_key="secret", max_clients=1) as server:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/healthz") as found:
            assert (found.status, found.read()) == (200, b"OK\n")
        for headers in ({}, {"Authorization": "Api-Key guess"}):
            with pytest.raises(InvalidStatus, match="401"):
                connected(server, additional_headers=headers)
        headers = {"Authorization": "Api-Key secret"}
        with connected(server, additional_headers=headers) as socket:
            socket.recv()
            with pytest.raises(InvalidStatus, match="503"):
                connected(server, additional_headers=headers)


def test_observations_in_work_are_answered_when_the_server_ends():
    policy = Echo()
    policy.hold.clear()
    with serving(policy) as server:
        socket, idle = connected(server), connected(server)
        assert unpack(socket.recv()) == unpack(idle.recv()) == {"robot": "echo"}
        socket.send(pack({"state": np.ones(2)}))
        assert policy.begun.wait(20)
        threading.Timer(0.3, policy.hold.set).start()
    np.testing.assert_array_equal(unpack(socket.recv())["actions"], np.ones((1, 2)))
    for one in (socket, idle):
        with pytest.raises(ConnectionClosed, match="1001"):
            one.recv(timeout=20)


def test_while_the_policy_is_busy_no_more_is_read():
    policy = Echo()
    policy.hold.clear()
    with serving(policy, max_waiting=1) as server:
        sockets = [connected(server) for _ in range(6)]
        for number, socket in enumerate(sockets):
            socket.recv()
            socket.send(pack({"state": np.full(2, number, np.float32)}))
        assert policy.begun.wait(20)
        time.sleep(0.2)
        assert server._queue.qsize() <= 1
        policy.hold.set()
        for number, socket in enumerate(sockets):
            assert unpack(socket.recv(timeout=20))["actions"][0, 0] == number
            socket.close()


def test_the_policy_answers_what_eager_pytorch_computes(made: Path):
    """By openpi's own client where it is installed, from PyPI and unchanged."""
    options = PolicyOptions(batch_sizes=(1, 2), prompt_lengths=(32,), num_steps=4, seed=3)
    policy = load_policy(made / "pi0", options)
    with serving(policy) as server:
        try:
            from openpi_client.websocket_client_policy import WebsocketClientPolicy
        except ModuleNotFoundError:
            pytest.skip("waits for openpi-client (pip install --no-deps openpi-client)")
        client = WebsocketClientPolicy("127.0.0.1", server.port)
        assert client.get_server_metadata()["action_horizon"] == 4
        model, noises = read_weights(made / "pi0"), np.random.default_rng(3)
        for number, prompt in enumerate(("go", "move to the blue disk " * 2)):
            given = observation(0.2 * number, prompt)
            found = client.infer(given)
            prepared = policy.prepare(given)
            noise = torch.from_numpy(noises.standard_normal((1, 4, 8), np.float32))
            with torch.no_grad():
                batch = stacked([prepared], 48)
                expected = model.sample_actions(batch, noise, 4)[0].numpy()
            actions = policy.preparation.actions_out(expected, prepared.raw_state)
            assert found["actions"].shape == (4, 7)
            np.testing.assert_allclose(found["actions"], actions, rtol=1e-4, atol=1e-5)
            assert found["server_timing"]["batch"] == 1
        with pytest.raises(RuntimeError, match="expected 8 numbers, got"):
            client.infer({**given, "observation/state": np.zeros(2)})
        assert client.infer(given)["actions"].shape == (4, 7)
        client._ws.close()


def test_rows_of_a_batch_do_not_depend_on_each_other(made: Path):
    policy = load_policy(made / "pi05", PolicyOptions(batch_sizes=(1, 3), num_steps=2))
    prepared = [policy.prepare(observation(x, "go " * n)) for n, x in ((1, 0.0), (9, 0.5))]
    noise = np.random.default_rng(0).standard_normal((2, 4, 8), np.float32)
    both = policy.act(prepared, noise)
    for index, one in enumerate(prepared):
        (alone,) = policy.act([one], noise[index : index + 1])
        np.testing.assert_allclose(both[index], alone, rtol=1e-4, atol=1e-5)
    assert not np.allclose(both[0], both[1])
    with pytest.raises(UsageError, match="batch_sizes"):
        PolicyOptions(batch_sizes=())


def started(made: Path, programs: Path) -> tuple[subprocess.Popen[str], int, str]:
    """Start `serve` in a process; return it, its port and what it printed."""
    options = ["--batch", "1", "--num-steps", "2", "--port", "0", "--cache-dir", str(programs)]
    command = [sys.executable, "-m", "recipes.openpi", "serve", "--policy", str(made / "pi0")]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if "serving at" in line:
            return process, int(line.rpartition(":")[2]), printed
    raise AssertionError(printed)


# Answers are tested above, in this process; tests of the compile cache have its programs.
@pytest.mark.slow
def test_after_kill_9_the_next_server_has_its_programs(made: Path, tmp_path: Path):
    compiled = []
    for end in ("kill", "terminate"):
        process, port, printed = started(made, tmp_path)
        try:
            compiled.append(printed)
            with sync.connect(f"ws://127.0.0.1:{port}", compression=None) as socket:
                socket.recv()
                found = answer(socket, pack(observation()))
                assert found["actions"].shape == (4, 7)
                if end == "kill":
                    # It ends in the middle of the next.
                    socket.send(pack(observation()))
                    process.kill()
        finally:
            getattr(process, end)()
            process.communicate(timeout=60)
    assert "1 programs ready" in compiled[0]
    assert "0 from the cache" in compiled[0]
    assert "1 from the cache" in compiled[1]
    assert process.returncode == 0
