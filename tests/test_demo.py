"""`make demo` tells the truth: its story runs, and what it proves can fail."""

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parent.parent / "demo"


def test_the_story_ends_with_a_proof_that_holds(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, DEMO / "story.py", "--orders", "400", "--keep", tmp_path / "kept"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "none was lost" in ran.stdout
    missing = f"from proof import prove; proof = prove({str(tmp_path / 'kept')!r}, 401); print(proof.lost, proof.holds)"
    looked = subprocess.run([sys.executable, "-c", missing], cwd=DEMO, capture_output=True, text=True, check=True)
    assert looked.stdout == "[400] False\n", "an order that was never there is missed"
