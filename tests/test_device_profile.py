"""Device profiles: what ships, the flash curve, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from labkit.device import DeviceProfile, Figure, FlashPoint, load_profile, profile_names
from labkit.device.figures import FIGURES, HOW
from labkit.device.profile import FORMAT, parse_profile
from labkit.errors import DeviceError

PHONES = {
    "snapdragon-8-gen-2": 73,
    "snapdragon-8-gen-3": 75,
    "snapdragon-8-elite": 79,
    "snapdragon-8-elite-gen-5": 81,
    "oneplus-15r": 81,
}


def content(**changes: Any) -> dict[str, Any]:
    value: dict[str, Any] = {
        "format": FORMAT,
        "name": "phone",
        "title": "A phone",
        "figures": {"ram_mib": {"value": 8192, "how": "measured", "source": "/proc/meminfo"}},
        "flash": [{"read_kib": 1024, "lanes": 4, "mib_s": 2000, "source": "fio"}],
    }
    return value | changes


def figures(name: str = "dram_gb_s", **given: Any) -> dict[str, Any]:
    figure = {"value": 68, "how": "published", "source": "data sheet"} | given
    return content()["figures"] | {name: figure}


def profile(points: list[tuple[float, int, float]]) -> DeviceProfile:
    ram = {"ram_mib": Figure(8192, "measured", "x")}
    return DeviceProfile("p", "P", ram, tuple(FlashPoint(k, n, r, "x") for k, n, r in points))


def test_every_named_profile_loads_and_every_figure_has_a_source():
    assert set(PHONES) < set(profile_names())
    assert {"apple-m2-pro", "ddr4-laptop"} < set(profile_names())
    for name in profile_names():
        loaded = load_profile(name)
        assert loaded.name == name
        assert loaded.need("decode_gb_s") > 1
        assert loaded.flash_mib_s(900, 4) > 100
        for figure in loaded.figures.values():
            assert figure.how in HOW
            assert len(figure.source) > 5


@pytest.mark.parametrize(("name", "version"), PHONES.items())
def test_phones_name_their_hexagon_version(name: str, version: int):
    assert load_profile(name).get("htp_version") == version


def test_a_profile_survives_its_file(tmp_path: Path):
    first = parse_profile(content(figures=figures(), notes="n"), "x")
    again = load_profile(first.save(tmp_path / "deep" / "p.json"))
    assert again.to_json() == first.to_json()
    assert again.table()["figure"].tolist() == ["ram_mib", "dram_gb_s"]


def test_flash_points_are_met_and_what_lies_between_is_between():
    curve = profile([(4096, 1, 1800), (4096, 2, 2400), (4096, 4, 2500), (128, 2, 900)])
    assert curve.flash_mib_s(4096, 2) == pytest.approx(2400)
    assert curve.flash_mib_s(128, 2) == pytest.approx(900)
    assert 900 < curve.flash_mib_s(700, 2) < 2400
    assert curve.flash_mib_s(4096, 1) == pytest.approx(1800)
    assert curve.flash_mib_s(128, 1) == pytest.approx(900 * 1800 / 2400)
    assert curve.flash_mib_s(1, 64) == pytest.approx(900 * 2500 / 2400)  # the nearest that is known


def test_one_flash_point_is_taken_for_every_size():
    assert profile([(4096, 4, 1000)]).flash_mib_s(64, 1) == 1000


def test_what_a_profile_lacks_is_named_with_the_way_to_get_it():
    bare = parse_profile(content(flash=[]), "my.json")
    with pytest.raises(DeviceError, match=r"my\.json: .*decode_gb_s.*labkit device --measure"):
        bare.need("decode_gb_s")
    with pytest.raises(DeviceError, match=r"my\.json: .*no flash rates"):
        bare.flash_mib_s(64, 4)
    assert bare.get("decode_gb_s") is None
    with pytest.raises(KeyError, match="no figure 'speed'"):
        bare.get("speed")


BAD = [
    (content(format="labkit-device 9"), "no device profile"),
    ([], "no device profile"),
    (content(figures={}), r"ram_mib \(physical memory\) is missing"),
    (content(figures=[1]), "'figures' must be an object"),
    (content(figures=figures("dram_gbs")), "no figure 'dram_gbs'. Did you mean 'dram_gb_s'"),
    (content(figures=figures(value=68e9)), "which no device has.*Is the unit right"),
    (content(figures=figures(value=-1)), "which no device has"),
    (content(figures=figures(value=0)), "which no device has"),
    (content(figures=figures(value=float("nan"))), "which no device has"),
    (content(figures=figures(value=float("inf"))), "which no device has"),
    (content(figures=figures(value="68 GB/s")), "it must be a number"),
    (content(figures=figures(value=True)), "it must be a number"),
    (content(figures=figures(value=None)), "it must be a number"),
    (content(figures=figures(how="guessed")), "has how = 'guessed'"),
    (content(figures=figures(source="")), "dram_gb_s: 'source' is missing"),
    (content(figures=figures(source=None)), "dram_gb_s: 'source' is missing"),
    (content(figures=figures("usable_mib", value=9000)), "more than the 8192 MiB of ram_mib"),
    (content(figures={"ram_mib": 8192}), "must be an object with value, how and source"),
    (content(name=""), "'name' is missing"),
    (content(title=3), "'title' is missing"),
    (content(speed=3), "'speed' is no field"),
    (content(flash={}), "'flash' must be a list"),
    (content(flash=[3]), "flash point 0 must be an object"),
    (
        content(flash=[{"read_kib": 4, "lanes": 4, "mib_s": 2000}]),
        "flash point 0: 'source' is missing",
    ),
    (content(flash=[{"read_kib": 0, "lanes": 4, "mib_s": 2, "source": "x"}]), "read_kib is 0"),
    (content(flash=[{"read_kib": 4, "lanes": 1.5, "mib_s": 2, "source": "x"}]), "whole number"),
    (
        content(flash=[{"read_kib": 4, "lanes": 1, "mib_s": 1e9, "source": "x"}]),
        "mib_s is 1000000",
    ),
    (content(flash=[{"read_kib": 4, "lanes": 1, "source": "x"}]), "mib_s is None"),
]


@pytest.mark.parametrize(("value", "message"), BAD)
def test_bad_content_is_refused_in_words(value: Any, message: str, tmp_path: Path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(value))
    with pytest.raises(DeviceError, match=message) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not JSON"),
        (b"\x00\xff\xfe", "not JSON"),
        (b'{"format": ', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b" " * (2 << 20), "over 1 MiB"),
    ],
)
def test_bad_bytes_are_refused_in_words(raw: bytes, message: str, tmp_path: Path):
    path = tmp_path / "bad.json"
    path.write_bytes(raw)
    with pytest.raises(DeviceError, match=message):
        load_profile(path)


def test_unknown_names_and_files_are_told_with_the_nearest(tmp_path: Path):
    with pytest.raises(DeviceError, match="Did you mean 'oneplus-15r'"):
        load_profile("oneplus15r")
    with pytest.raises(DeviceError, match=r"absent\.json: the device profile cannot be read"):
        load_profile(tmp_path / "absent.json")
    with pytest.raises(DeviceError, match="cannot be read"):
        load_profile(tmp_path)


def test_a_profile_that_cannot_be_written_says_why(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match="cannot be written"):
        parse_profile(content(), "x").save(tmp_path / "file" / "p.json")


def test_added_figures_are_checked_too():
    good = parse_profile(content(), "x")
    assert good.with_figures({"tops": Figure(45, "published", "x")}).get("tops") == 45
    with pytest.raises(DeviceError, match=r"tops is 4\.5e\+13"):
        good.with_figures({"tops": Figure(45e12, "published", "x")})


def test_every_figure_has_a_sensible_range():
    for name, kind in FIGURES.items():
        assert kind.low < kind.high, name
        assert kind.meaning
