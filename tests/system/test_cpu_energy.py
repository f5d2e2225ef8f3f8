"""RAPL counters as the kernel writes them: packages only, and they wrap around."""

from pathlib import Path

from penstock.system.cpu_energy import CpuEnergy


def a_zone(root: Path, number: str, name: str, microjoules: int) -> Path:
    zone = root / f"intel-rapl:{number}"
    zone.mkdir()
    (zone / "name").write_text(f"{name}\n")
    (zone / "energy_uj").write_text(f"{microjoules}\n")
    (zone / "max_energy_range_uj").write_text("1000000000\n")
    return zone / "energy_uj"


def test_packages_are_added_up_since_the_start(tmp_path):
    first = a_zone(tmp_path, "0", "package-0", 500_000_000)
    second = a_zone(tmp_path, "1", "package-1", 7)
    parts = [a_zone(tmp_path, "0:0", "core", 0), a_zone(tmp_path, "2", "psys", 0)]
    energy = CpuEnergy(tmp_path)
    assert energy.read() == 0
    first.write_text("503000000")
    second.write_text("1000007")
    for each in parts:
        each.write_text("900000000")
    assert energy.read() == 4.0
    assert energy.read() == 4.0


def test_a_counter_that_wraps_goes_on(tmp_path):
    counter = a_zone(tmp_path, "0", "package-0", 999_000_000)
    energy = CpuEnergy(tmp_path)
    counter.write_text("2000000")
    assert energy.read() == 3.0


def test_without_readable_counters_nothing_is_known(tmp_path):
    assert CpuEnergy(tmp_path).read() is None
    assert CpuEnergy(tmp_path / "nowhere").read() is None
    counter = a_zone(tmp_path, "0", "package-0", 5)
    counter.write_text("no number")
    assert CpuEnergy(tmp_path).read() is None
