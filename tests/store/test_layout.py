import pytest

from torchtitan_lite.disk.durable import temporary_name
from torchtitan_lite.store import layout

UNSUPPORTED = (
    "foo",
    "step-",
    "step-abc",
    "step-99.tmp",
    "step-10.bak",
    "my-step-3",
    "step-007",
    "step--1",
    "step-+1",
    "step-1 ",
    "step-1\n",
    "step-\u0661",
    "Step-1",
    "step_1",
    "step-1.staging",
    ".trash-step-1-1",
)


@pytest.mark.parametrize("step", [0, 1, 10, 123456789])
def test_every_name_is_parsed_to_what_it_was_made_from(step: int) -> None:
    assert layout.parse_step(layout.step_dir(step)) == step
    assert layout.parse_staging(layout.staging_dir(step, "0f3a")) == step
    assert layout.parse_trash(layout.trash_dir(step, 12)) == (step, 12)
    assert layout.parse_replaced(layout.replaced_dir(step, 3)) == (step, 3)


def test_a_staging_folder_of_an_earlier_version_is_still_one() -> None:
    assert layout.parse_staging("step-5.staging") == 5


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_name_that_is_not_exactly_a_step_is_unknown(name: str) -> None:
    assert layout.parse_step(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "step-5.staging2",
        "step-5.staging-",
        "step-5.staging-A",
        "step-05.staging",
        ".trash-step-5",
        ".replaced-step-5-x",
        ".trash-5-1",
    ],
)
def test_a_name_that_is_nearly_one_of_the_protocol_is_unknown(name: str) -> None:
    assert not any(parse(name) for parse in (layout.parse_staging, layout.parse_trash, layout.parse_replaced))


def test_a_name_for_an_obstacle_is_unknown_to_every_parser() -> None:
    names = [layout.aside_dir(5, "foreign", number) for number in (1, 2)]
    assert names == ["step-5.foreign", "step-5.foreign-2"]
    assert not any(parse(name) for parse in (layout.parse_step, layout.parse_staging) for name in names)


def test_a_name_for_a_damaged_checkpoint_is_unknown_to_every_parser() -> None:
    names = [layout.aside_dir(5, "corrupt", number) for number in (1, 2)]
    assert names == ["step-5.corrupt", "step-5.corrupt-2"]
    parsers = (layout.parse_step, layout.parse_staging, layout.parse_trash, layout.parse_replaced)
    assert not any(parse(name) is not None for parse in parsers for name in names)


def test_data_files_are_recognized() -> None:
    assert layout.data_file(3, 0) == "__3_0.distcp"
    assert layout.is_data_file("__3_0.distcp")
    assert not any(map(layout.is_data_file, (layout.METADATA, layout.MANIFEST, "__3.distcp", "__3_0.distcp.bak")))


def test_a_name_for_an_abandoned_checkpoint_has_its_run_and_is_unknown_to_every_parser() -> None:
    names = [layout.aside_dir(5, "abandoned-a1b2", number) for number in (1, 2)]
    assert names == ["step-5.abandoned-a1b2", "step-5.abandoned-a1b2-2"]
    parsers = (layout.parse_step, layout.parse_staging, layout.parse_trash, layout.parse_replaced)
    assert not any(parse(name) is not None for parse in parsers for name in names)


def test_names_that_other_versions_and_people_rely_on_never_change() -> None:
    assert (layout.METADATA, layout.MANIFEST) == (".metadata", "manifest.json")
    assert (layout.LOCK, layout.FINDINGS) == ("writer.lock", "findings.json")
    assert (layout.step_dir(5), layout.staging_dir(5, "0f3a")) == ("step-5", "step-5.staging-0f3a")
    assert (layout.trash_dir(5, 2), layout.replaced_dir(5, 2)) == (".trash-step-5-2", ".replaced-step-5-2")
    assert temporary_name("manifest.json") == ".manifest.json.tmp"
