"""Write cpu.lock: what pip resolves, on this platform, for the package with everything its tests use.

Run as `make lock`. Extras that need a GPU, a compiler or a server stay out. A build tag such as `+cpu` is cut off, so
that the same line serves an index that carries another build of that version.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WANTED = ["torch==2.13.0", f"{ROOT}[bge,cpu,kernels,ner,reader,dev]"]
HEADER = "# Written by `make lock` for CPython 3.11; every line is one exact version.\n"


def main() -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    report = json.loads(subprocess.run([*command, *WANTED], check=True, stdout=subprocess.PIPE).stdout)
    resolved = {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in report["install"]}
    del resolved["zeromem-torch"]
    pins = [f"{name}=={version.partition('+')[0]}\n" for name, version in sorted(resolved.items())]
    (ROOT / "requirements" / "cpu.lock").write_text(HEADER + "".join(pins))


if __name__ == "__main__":
    main()
