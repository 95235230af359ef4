"""Types are made ready by one thread, however many want to read them at the same moment."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading, types
from killick.model.typed import convert
from killick.model.vector import _decoder
from killick.type_init import ready

sys.setswitchinterval(1e-6)
parts = "".join(
    f"class S{number}(msgspec.Struct):\\n" + "".join(f"    a{field}: int | str | None = None\\n" for field in range(30))
    for number in range(30)
)
for round in range(9):
    module = sys.modules[f"kinds{round}"] = types.ModuleType(f"kinds{round}")
    top = "class Top(msgspec.Struct):\\n" + "".join(f"    s{n}: S{n} | None = None\\n" for n in range(30))
    exec(f"from __future__ import annotations\\nimport msgspec\\n{parts}{top}", module.__dict__)
    begin = threading.Barrier(4)

    def read():
        begin.wait()
        match round % 3:
            case 0:
                found = convert({"s0": {"a0": 1}, "s29": {"a1": "x"}}, module.Top)
            case 1:
                found = ready(module.Top)()
            case 2:
                [found] = _decoder(module.Top)(b"[{}]")
        assert isinstance(found, module.Top)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("alive")
"""


def test_threads_that_read_a_type_for_the_first_time_at_once_live_on() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
