"""A short run of kill_server.py, and proof that it can fail."""

import asyncio
from pathlib import Path

from faults import kill_server
from toys import RULES, HashEncoder

from zeromem_torch.library import ZeroMem


def test_no_acknowledged_write_is_lost_and_the_server_catches_up(tmp_path: Path) -> None:
    result = kill_server.run(2, 1, tmp_path / "memory")
    assert result.problems == []
    assert result.kills == 2
    assert len(result.acknowledged) > 10
    lost, changed = list(result.acknowledged)[:2]
    with ZeroMem.open(tmp_path / "memory", encoder=HashEncoder(), config=RULES) as memory:
        assert memory.verify().ok
        memory.delete(lost, boundary=result.acknowledged[lost][0])
        memory.update(changed, boundary=result.acknowledged[changed][0], text="something else")
    process, url = kill_server._started(tmp_path / "memory")
    try:
        asyncio.run(kill_server._look(url, result))
    finally:
        process.kill()
        process.wait()
    assert [problem.split()[0] for problem in result.problems] == [lost, changed]
