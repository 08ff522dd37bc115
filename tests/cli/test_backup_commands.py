"""`penstock backup`, `penstock restore`, and `penstock verify` of a backup."""

from pathlib import Path

from penstock.cli.failures import NEGATIVE
from tests.cli.conftest import CommandLine


def test_a_backup_is_made_verified_and_restored(orders_cli: CommandLine, tmp_path: Path) -> None:
    backup, new = tmp_path / "backup", tmp_path / "new"
    said = orders_cli.out("backup", str(orders_cli.target), str(backup))
    assert said.startswith(f"backed up to {backup} as of ")
    assert "sound" in orders_cli.out("verify", "--broker", str(backup))
    assert orders_cli.json("backup", str(orders_cli.target), str(tmp_path / "b2"), "--previous", str(backup))["logs"] == 4
    said = orders_cli.out("restore", str(backup), str(new))
    assert said.startswith(f"restored {new} as of ")
    before, after = orders_cli.json("stats"), orders_cli.json("stats", "--broker", str(new))
    assert [queue["produced"] for queue in before["queues"]] == [queue["produced"] for queue in after["queues"]]


def test_damage_in_a_backup_is_found(orders_cli: CommandLine, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    orders_cli.out("backup", str(orders_cli.target), str(backup))
    (catalog,) = (backup / "logs" / "0000000000000000").rglob("*.log")
    catalog.write_bytes(catalog.read_bytes() + b"x")
    said = orders_cli.out("verify", "--broker", str(backup), code=NEGATIVE)
    assert f"{catalog.name} is damaged: it is not what the backup wrote" in said


def test_refusals_change_nothing(orders_cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    said = orders_cli.refused("backup", str(orders_cli.target), str(tmp_path / "full"))
    assert "is not empty" in said
    said = orders_cli.refused("restore", str(tmp_path / "full"), str(tmp_path / "new"))
    assert "is no backup" in said
    assert not (tmp_path / "new").exists()
    said = orders_cli.refused("backup", "http://localhost:1", str(tmp_path / "new"))
    assert "on the server's machine" in said
