import pytest

from memlab import MemlabError, StepConfig
from memlab._util.checks import size
from memlab._util.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        ("24GiB", 24 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5kib", 1536),
        ("2 GB", 2 * 10**9),
        ("4096", 4096),
        (" .5 TiB ", 2**39),
    ],
)
def test_sizes_are_read_as_people_type_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("bad", ["", "abc", "24G", "-1GiB", "1 2", 0, -5, 1.5, None, True, "0.1 B"])
def test_what_is_no_size_names_field_and_value(bad):
    with pytest.raises(MemlabError, match="memory_limit") as caught:
        parse_bytes(bad)
    assert repr(bad) in str(caught.value)
    assert "GiB" in str(caught.value)


def test_sizes_print_in_binary_units_and_durations_in_the_unit_that_reads():
    printed = [format_bytes(n) for n in (0, 1023, 1024, 1406142546, 3 * 2**40, -(2**20))]
    assert printed == ["0 B", "1023 B", "1.00 KiB", "1.31 GiB", "3.00 TiB", "-1.00 MiB"]
    assert [format_seconds(s) for s in (0.4123, 12.34, 0.00002)] == ["412 ms", "12.3 s", "20 us"]


@pytest.mark.parametrize(
    ("typed", "share"),
    [("40 %", 0.4), ("0,5", 0.5), ("0.25", 0.25), ("50%", 0.5), (" 1 ", 1.0), (",75", 0.75)],
)
def test_a_share_is_read_as_people_type_it(typed, share):
    assert StepConfig(memory_budget=typed) == StepConfig(memory_budget=share)
    assert isinstance(StepConfig(memory_budget=typed).memory_budget, float)


def test_what_is_no_share_is_refused_and_a_size_leads_to_what_finds_settings_for_it():
    for bad in ("", "%", "half", "1,000.5", "0.5 %%", "nan", "inf", "140 %", "-1"):
        with pytest.raises(MemlabError, match="memory_budget"):
            StepConfig(memory_budget=bad)
    with pytest.raises(MemlabError, match=r"memory_budget='8GB'.*recommend.*limit=8000000000"):
        StepConfig(memory_budget="8GB")


@pytest.mark.parametrize(
    ("typed", "meant"), [("8", "8 GiB"), ("7.5", "7.5 GiB"), ("8000", "8000 MiB")]
)
def test_a_limit_without_a_unit_is_asked_about(typed, meant):
    with pytest.raises(MemlabError, match=f"did you mean '{meant}'"):
        size("memory_limit", typed)
    assert size("memory_limit", "8589934592") == size("memory_limit", 2**33) == 2**33
    assert size("memory_limit", 8) == 8  # an int is bytes
