"""One tree, and every error of it says what was found and what to do."""

import inspect

import pytest

from shoestring import errors

TREE = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
class TestEveryError:
    def test_is_a_shoestring_error(self, kind):
        assert issubclass(kind, errors.ShoestringError)

    def test_carries_message_and_hint(self, kind):
        error = kind("found 3, expected 2", hint="give 2")
        assert (error.message, error.hint) == ("found 3, expected 2", "give 2")
        assert str(error) == "found 3, expected 2 (hint: give 2)"

    def test_cannot_be_raised_without_a_hint(self, kind):
        with pytest.raises(TypeError, match="hint"):
            kind("found 3, expected 2")

    def test_exit_code_tells_usage_from_the_rest(self, kind):
        assert kind.exit_code == (2 if issubclass(kind, errors.UsageError) else 1)

    def test_says_what_it_is_for(self, kind):
        assert kind.__doc__
