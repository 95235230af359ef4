"""`python -m soak [postgres] [sqlite] [failover] [upgrade]`: the long form. Prints its counts, and what is wrong."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from servers import Pair, Server
from soak.conducting import Setting, far_side, play
from soak.judging import judge

STORES: Final = ("postgres", "sqlite", "failover", "upgrade")


def soak(store: str, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """One soak on one store, and its verdict."""
    options = {
        name: getattr(asked, name) for name in ("seed", "runs", "workers", "blows", "every_seconds", "limit_seconds")
    }
    if store == "sqlite":
        return _soaked(Setting(f"sqlite:///{folder}/killick.db", folder, restarts=0, **options), None)
    if store == "failover":
        with Pair() as pair:
            return _soaked(Setting(pair.url, folder, restarts=1, pooler_url=pair.pooler_url, **options), pair)
    with Server() as server:
        restarts, upgrades = (0, True) if store == "upgrade" else (asked.restarts, False)
        return _soaked(Setting(server.url, folder, restarts=restarts, upgrades=upgrades, **options), server)


def _soaked(setting: Setting, server: Server | Pair | None) -> dict[str, Any]:
    with far_side(setting.folder, setting.seed):
        return judge(setting, play(setting, server))


def _print(store: str, found: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{store}\n")
    sys.stdout.writelines(f"  {name:24} {value}\n" for name, value in found.items() if name not in ("wrong", "said"))
    sys.stdout.writelines(f"  WRONG: {each}\n" for each in found["wrong"][:40])
    sys.stdout.write(f"  {len(found['wrong'])} things do not hold\n" if found["wrong"] else "  all of it holds\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("stores", nargs="*", help=" or ".join(STORES))
    parser.add_argument("--runs", type=int, default=2_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--restarts", type=int, default=2, help="of the PostgreSQL server")
    parser.add_argument("--blows", type=int, default=1_000_000, help="at the most")
    parser.add_argument("--every-seconds", type=float, default=1.0, help="there is a blow")
    parser.add_argument("--limit-seconds", type=float, default=1_800.0, help="after which it has failed")
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # on the way out, everybody is ended who was forked
    failed = False
    for store in asked.stores or STORES:
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
        found = soak(store, folder, asked)
        if asked.json:
            sys.stdout.write(f"{json.dumps(found)}\n")
        else:
            _print(store, found)
        if found["wrong"]:
            sys.stderr.write(f"seed {asked.seed}; what the workers said is in {folder}\n")
            failed = True
        else:
            shutil.rmtree(folder, ignore_errors=True)
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
