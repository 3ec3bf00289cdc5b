"""Compiles every token in this folder into `compiled.json`. Needs vyper 0.4.3, which the tests do without."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent


def main() -> None:
    """Write the file anew."""
    compiled = {}
    for source in sorted(FOLDER.glob("*.vy")):
        made = subprocess.run(["vyper", "-f", "abi,bytecode", source], capture_output=True, text=True, check=True)
        abi, bytecode = made.stdout.splitlines()
        compiled[source.stem] = {"abi": json.loads(abi), "bytecode": bytecode}
    (FOLDER / "compiled.json").write_text(json.dumps(compiled, indent=1) + "\n")


if __name__ == "__main__":
    main()
