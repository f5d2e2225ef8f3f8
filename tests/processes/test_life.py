"""Processes that serve: why they died, as the parent learns it."""

import asyncio
import os
from pathlib import Path

import pytest
from waiting import until

from penstock.processes.life import ProcessLife
from penstock.system import memory


async def run_process() -> tuple[ProcessLife, str]:
    """Run the module `made_up_worker` until it is dead, and return its reason."""
    loop = asyncio.get_running_loop()
    reasons: list[str] = []
    life = ProcessLife(loop, reasons.append, "made_up_worker")

    def read() -> None:
        if not life.sock.recv(1):
            loop.remove_reader(life.sock.fileno())
            life.socket_closed()

    loop.add_reader(life.sock.fileno(), read)
    await until(lambda: bool(reasons))
    loop.remove_reader(life.sock.fileno())
    life.sock.close()
    return life, reasons[0]


CLOSED = "socket.socket(fileno=int(sys.argv[1])).close()"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
DEATHS = {
    "exit": ("os._exit(3)", 0, "exited with status 3", False),
    "late exit": (f"{CLOSED}; time.sleep(0.3); os._exit(4)", 0, "exited with status 4", False),
    "exception": ("raise ValueError", 0, "exited with status 1", False),
    "crash": ("os.kill(os.getpid(), signal.SIGTERM)", 0, "was killed by SIGTERM", False),
    "killed from outside": (KILLED, 0, "was killed by SIGKILL", True),
    "out of memory": (KILLED, 1, "was killed by the kernel for lack of memory", False),
    "killed by the core": (f"{CLOSED}; time.sleep(60)", 0, "was killed by SIGKILL", False),
}


@pytest.mark.parametrize(("code", "num_oom", "text", "is_outside"), DEATHS.values(), ids=DEATHS)
def test_why_a_process_died_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    num_oom: int,
    text: str,
    is_outside: bool,
) -> None:
    module = tmp_path / "made_up_worker.py"
    module.write_text(f"import os, signal, socket, sys, time\n{code}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    # Only the one that would sleep for a minute is killed.
    end_s = 1.0 if "sleep(60)" in code else 20.0
    monkeypatch.setattr("penstock.processes.life.END_S", end_s)
    total = memory.read_oom_kills() or 0

    async def main() -> None:
        # The first process knows how many there were before; this one dies after `num_oom` more.
        monkeypatch.setattr("penstock.system.memory.read_oom_kills", lambda: total)
        await run_process()
        monkeypatch.setattr("penstock.system.memory.read_oom_kills", lambda: total + num_oom)
        life, reason = await run_process()
        assert reason == text
        assert life.was_killed_outside == is_outside
        monkeypatch.setattr("penstock.system.memory.read_oom_kills", lambda: total)
        await run_process()

    asyncio.run(main())
