"""A finished script ends in seconds, with its status and all of its output, whatever is left."""

import gzip
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRIVER = """
import runpy, sys
from tpuport.compat.runner.exit import finish
status = 0
try:
    runpy.run_path(sys.argv[1], run_name="__main__")
except SystemExit as end:
    status = end.code
finish(status, idle=0.5, working=float(sys.argv[2]))
sys.exit(status)
"""
LATE = 'import atexit, sys\natexit.register(print, "at exit")\n'
END = '\nprint("end")\nsys.exit(7)\n'


STUCK_THREAD = """
    import threading
    def wait():
        threading.Event().wait()
    threading.Thread(target=wait, name="the writer").start()
"""
STUCK_POOL = """
    import threading
    from concurrent.futures import ThreadPoolExecutor
    def wait():
        threading.Event().wait()
    ThreadPoolExecutor(1, thread_name_prefix="the writer").submit(wait)
"""
ASKING_THREAD = """
    import threading, time
    def wait():
        while True:
            time.sleep(0.1)
    threading.Thread(target=wait, name="the writer").start()
"""
STUCK_CHILD = """
    import multiprocessing, time
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.name = "loader"
    child.start()
    print(child.pid)
"""
STUCK_PROCESS_POOL = """
    import multiprocessing, time
    from concurrent.futures import ProcessPoolExecutor
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
    pool.submit(time.sleep, 600)
    time.sleep(0.3)
    print(*pool._processes)
"""
STUCK_AT_EXIT = """
    import threading
    def late():
        threading.Event().wait()
    atexit.register(late)
"""
FAILING_AT_EXIT = STUCK_THREAD + "    atexit.register(lambda: 1 / 0)"
PRINTING_IN_C = STUCK_THREAD + '\n    import ctypes; ctypes.CDLL(None).printf(b"from C\\n")\n'
# Scripts that take no time of the processor, and the seconds for which work is waited for.
WAITING = {
    **dict.fromkeys((STUCK_THREAD, STUCK_POOL, ASKING_THREAD), 20.0),
    **dict.fromkeys((STUCK_CHILD, STUCK_PROCESS_POOL), 20.0),
    **dict.fromkeys((FAILING_AT_EXIT, PRINTING_IN_C), 20.0),
    STUCK_AT_EXIT: 2.0,
}


class Running:
    """A script on its way to its end, in a process of its own."""

    def __init__(self, folder: Path, script: str, working: float) -> None:
        path = folder / "script.py"
        path.write_text(LATE + textwrap.dedent(script) + END)
        self.printed = [folder / "out", folder / "err"]
        command = [sys.executable, "-c", DRIVER, str(path), str(working)]
        self.start, self.seconds = time.monotonic(), 0.0
        with self.printed[0].open("wb") as out, self.printed[1].open("wb") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT)
        self.thread = threading.Thread(target=self.wait)
        self.thread.start()

    def wait(self) -> None:
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.seconds = time.monotonic() - self.start

    def ended(self) -> tuple[subprocess.CompletedProcess, float]:
        self.thread.join()
        printed = (path.read_text() for path in self.printed)
        status = self.process.returncode
        return subprocess.CompletedProcess(self.process.args, status, *printed), self.seconds


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Runs a script to its end: the process, and the seconds that it took.

    Those that only wait begin together, with the first of them that is asked for.
    """
    together: dict[str, Running] = {}

    def begin(script: str, working: float) -> Running:
        return Running(tmp_path_factory.mktemp("script"), script, working)

    def run(script: str, working: float = 20.0) -> tuple[subprocess.CompletedProcess, float]:
        if script in WAITING and not together:
            together.update({one: begin(one, seconds) for one, seconds in WAITING.items()})
        running = together.get(script) or begin(script, working)
        return running.ended()

    return run


@pytest.mark.parametrize(
    "script",
    [
        "",
        "import threading; threading.Thread(target=lambda: None).start()",
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(4)
        list(pool.map(str, range(8)))
        """,
        """
        import threading, time
        def work():
            time.sleep(0.2)
            print("worked")
        threading.Thread(target=work).start()
        """,
    ],
)
def test_nothing_is_said_where_python_would_end_by_itself(ended, script: str):
    done, _ = ended(script)
    assert (done.returncode, done.stderr) == (7, "")
    lines = done.stdout.split("\n")
    assert lines[0] == "end"
    assert lines[-2:] == ["at exit", ""]
    assert ("worked" in lines) == ("worked" in script)


@pytest.mark.parametrize("script", [STUCK_THREAD, STUCK_POOL, ASKING_THREAD])
def test_a_stuck_thread_is_named_and_left(ended, script: str):
    done, seconds = ended(script)
    assert done.returncode == 7
    assert done.stdout == "end\nat exit\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("tpuport run: the script has ended; left thread 'the writer")
    assert "script.py:" in line
    assert " in wait: " in line
    assert seconds < 10


def test_a_thread_that_works_is_waited_for(ended):
    done, _ = ended(
        """
        import threading, time
        def work():
            end = time.monotonic() + 2
            while time.monotonic() < end:
                sum(range(1000))
            print("worked")
        threading.Thread(target=work).start()
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "end\nworked\nat exit\n", "")


def test_but_not_for_ever(ended):
    done, seconds = ended(
        """
        import threading
        def work():
            while True:
                pass
        threading.Thread(target=work, name="spinner").start()
        """,
        working=2,
    )
    assert (done.returncode, done.stdout) == (7, "end\nat exit\n")
    assert "left thread 'spinner'" in done.stderr
    assert seconds < 20


@pytest.mark.parametrize("script", [STUCK_CHILD, STUCK_PROCESS_POOL])
def test_a_stuck_child_is_stopped(ended, script: str):
    done, seconds = ended(script)
    pid, *rest = done.stdout.split("\n")
    assert (done.returncode, rest) == (7, ["end", "at exit", ""])
    assert f"(pid {pid})" in done.stderr
    assert not Path(f"/proc/{pid}").exists()
    assert seconds < 15


def test_a_daemon_child_ends_as_python_ends_it(ended):
    done, _ = ended(STUCK_CHILD.replace("child.start()", "child.daemon = True; child.start()"))
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.endswith("end\nat exit\n")


def test_a_stuck_exit_function_is_named_and_left(ended):
    done, seconds = ended(STUCK_AT_EXIT)
    assert (done.returncode, done.stdout) == (7, "end\n")
    assert "left while a function registered with atexit was at" in done.stderr
    assert "script.py:" in done.stderr
    assert seconds < 15


def test_an_exit_function_may_fail(ended):
    done, _ = ended(FAILING_AT_EXIT)
    assert (done.returncode, done.stdout) == (7, "end\nat exit\n")
    assert "ZeroDivisionError" in done.stderr


def test_what_c_code_has_buffered_is_written(ended):
    done, _ = ended(PRINTING_IN_C)
    assert done.returncode == 7
    assert "from C\n" in done.stdout


def test_files_that_a_script_leaves_open_are_written_where_the_process_is_left(ended, tmp_path):
    done, _ = ended(
        f"""
        import gzip, sys, types, zipfile
        sys.modules["libtpu"] = types.ModuleType("libtpu")  # its threads keep processes alive
        log, packed = open({str(tmp_path / "log")!r}, "w"), gzip.open({str(tmp_path / "gz")!r}, "w")
        archive = zipfile.ZipFile({str(tmp_path / "zip")!r}, "w")
        log.write("text"), packed.write(b"bytes"), archive.writestr("name", "in it")
        sys.kept = log, packed, archive
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "end\nat exit\n", "")
    assert (tmp_path / "log").read_text() == "text"
    assert gzip.decompress((tmp_path / "gz").read_bytes()) == b"bytes"
    assert zipfile.ZipFile(tmp_path / "zip").read("name") == b"in it"


def test_a_closed_output_is_no_reason_to_fail(ended):
    done, _ = ended("sys.stdout.close(); atexit.unregister(print); sys.exit(7)")
    assert (done.returncode, done.stderr) == (7, "")


def test_who_does_not_want_to_wait_interrupts(ended):
    done, seconds = ended(
        """
        import os, signal, threading, time
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def work():
            end = time.monotonic() + 1
            while True:
                if end and time.monotonic() > end:
                    os.kill(os.getpid(), signal.SIGINT)
                    end = None
        threading.Thread(target=work).start()
        """,
        working=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "end\nat exit\n", "")
    assert seconds < 30
