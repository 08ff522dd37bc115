"""`make demo` runs and its checks pass; and its check of the log finds a missing order."""

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parent.parent / "demo"


def test_the_demo_runs_and_its_checks_pass(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, DEMO / "run.py", "--orders", "400", "--keep", tmp_path / "kept"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "none was lost" in ran.stdout
    missing = f"from log_check import check_log; check = check_log({str(tmp_path / 'kept')!r}, 401); print(check.lost, check.passed)"
    checked = subprocess.run([sys.executable, "-c", missing], cwd=DEMO, capture_output=True, text=True, check=True)
    assert checked.stdout == "[400] False\n", "an order that was never produced is missing"
