"""`shoestring codecs` lists what the registry knows."""

import json

import pytest

from shoestring.cli import main
from shoestring.codec import registry


def test_text_lists_every_codec_with_summary_and_options(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["codecs"])
    out, err = capsys.readouterr()
    assert out.startswith("auto ")
    for name in registry.names():
        assert f"{registry.describe(name)}\n" in out
        assert all(option.text in out for option in registry.options(name))
    assert "name:option=value" in err


def test_json_builds_every_codec_again(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["codecs", "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    auto, *listing = json.loads(out)
    assert (auto["name"], auto["options"], auto.keys()) == ("auto", [], listing[0].keys())
    assert [entry["name"] for entry in listing] == registry.names()
    for entry in listing:
        assert entry["summary"] == registry.describe(entry["name"])
        given = {option["name"]: option["default"] for option in entry["options"]}
        assert given == {option.name: option.default for option in registry.options(entry["name"])}
