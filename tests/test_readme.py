"""The README's example runs as printed, and its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT/"README.md").read_text("utf-8")


def test_the_import_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    printed = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "nora-dev/s004" in printed


def test_links_and_pictures_exist():
    targets = re.findall(r"\]\(((?!http)[^)#]+)\)", README)
    assert len(targets) > 8
    assert [target for target in targets if not (ROOT/target).exists()] == []
