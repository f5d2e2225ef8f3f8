"""When the files of a model count as changed."""

from pathlib import Path

from penstock.serving.file_watch import FileWatch, Stamps


def files(**sizes: int) -> Stamps:
    return {Path(name): (1, size) for name, size in sizes.items()}


def test_what_was_loaded_is_no_change():
    watch = FileWatch(settle_s=1.0)
    watch.know("a", files(x=1))
    assert [watch.changed({"a": files(x=1)}, now) for now in (0.0, 2.0, 4.0)] == [[], [], []]


def test_a_change_counts_once_it_has_lasted():
    watch = FileWatch(settle_s=1.0)
    watch.know("a", files(x=1))
    assert watch.changed({"a": files(x=2)}, 0.0) == []
    assert watch.changed({"a": files(x=2)}, 0.5) == [], "two looks, but too soon"
    assert watch.changed({"a": files(x=2)}, 1.0) == ["a"]
    assert watch.changed({"a": files(x=2)}, 9.0) == [], "reported once, loaded or not"


def test_a_copy_under_way_is_not_loaded():
    watch = FileWatch()
    for now, size in enumerate((1, 2, 3)):
        assert watch.changed({"a": files(x=size)}, now) == []
    assert watch.changed({"a": files(x=3, y=1)}, 3) == []
    assert watch.changed({"a": files(x=3, y=1)}, 4) == ["a"]


def test_a_change_that_is_taken_back_is_none():
    watch = FileWatch()
    watch.know("a", files(x=1))
    looks = [files(x=2), files(x=1), files(x=1), files(x=1)]
    assert [watch.changed({"a": look}, now) for now, look in enumerate(looks)] == [[], [], [], []]


def test_models_come_and_go_and_do_not_disturb_each_other():
    watch = FileWatch()
    watch.know("a", files(x=1))
    both = {"a": files(x=1), "b": files(y=1)}
    assert [watch.changed(both, 0), watch.changed(both, 1)] == [[], ["b"]]
    assert sorted(watch.names) == ["a", "b"]
    left = {"a": {}, "b": files(y=1)}
    assert [watch.changed(left, 2), watch.changed(left, 3)] == [[], ["a"]]
    assert watch.changed(left, 4) == []


def test_knowing_a_model_again_changes_nothing():
    watch = FileWatch()
    watch.know("a", files(x=1))
    watch.know("a", files(x=2))
    assert [watch.changed({"a": files(x=2)}, now) for now in (0, 1)] == [[], ["a"]]
