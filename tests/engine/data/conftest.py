import pytest

from tests.engine.text_tokenizer import make_text_tokenizer


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory):
    return make_text_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def raw_tokenizer(tmp_path_factory):
    return make_text_tokenizer(tmp_path_factory.mktemp("raw"), chat=False)
