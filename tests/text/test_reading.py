"""What is read: sentences by column names, WordNet's own format, neighbours of words; what is wrong is said with its place."""

import gzip
from pathlib import Path

import pytest
import text_tools as world

from cure_ray.errors import UserError
from cure_ray.text.lists import word_lists
from cure_ray.text.neighbours import read_neighbours
from cure_ray.text.tsv import Sentence, find_splits, read_sentences, write_sentences
from cure_ray.text.wordnet import WordNet, find_wordnet, read_wordnet
from cure_ray.text.words import STOP_WORDS, Change, candidates, exchange, in_case_of, may_change


def test_columns_are_found_by_name_whatever_the_line_ends(tmp_path: Path) -> None:
    world.write_sentences(tmp_path / "SST-2")
    files = find_splits("sst2", [tmp_path / "elsewhere", tmp_path])
    train, test = read_sentences(files["train"]), read_sentences(files["test"])
    assert (len(train), len(test)) == (48, 16)
    assert train[0] == Sentence("the movie is great and fine .", 1)
    assert [(s.label, s.text) for s in train + test] == world.sentences()[:64]
    write_sentences(tmp_path / "again.tsv", train)
    assert read_sentences(tmp_path / "again.tsv") == train


def test_a_byte_order_mark_and_quotes_are_taken_as_they_are_meant(tmp_path: Path) -> None:
    (tmp_path / "q.tsv").write_bytes('\ufeffindex\tSentence\tlabel\n0\tsaid " well\t1\n\n'.encode())
    assert read_sentences(tmp_path / "q.tsv") == [Sentence('said " well', 1)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("index\tsentence\n0\tno label here\n", "must name the columns label and sentence"),
        ("sentence\tlabel\nfine\t1\n \t0\n", "line 3: the sentence is empty"),
        ("sentence\tlabel\nfine\tgood\n", "line 2: the label 'good' is not a whole number"),
        ("sentence\tlabel\nfine\n", "line 2: 1 columns, the first line names 2"),
        ("sentence\tlabel\n", "no sentences below the first line"),
    ],
)
def test_what_is_no_table_of_sentences_is_refused_with_its_line(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text(content)
    with pytest.raises(UserError, match=said):
        read_sentences(tmp_path / "t.tsv")


def test_missing_and_damaged_files_say_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no sentences of 'sst2'.*\n.*SST-2\nUnpack GLUE"):
        find_splits("sst2", [tmp_path])
    (tmp_path / "t.tsv.gz").write_bytes(gzip.compress(b"sentence\tlabel\n")[:12])
    with pytest.raises(UserError, match="cannot be read as tab-separated"):
        read_sentences(tmp_path / "t.tsv.gz")


@pytest.fixture(scope="module")
def wordnet(tmp_path_factory: pytest.TempPathFactory) -> WordNet:
    return read_wordnet(world.write_wordnet(tmp_path_factory.mktemp("wordnet")))


def test_synonyms_are_the_other_lemmas_of_every_synset_the_first_sense_first(wordnet: WordNet) -> None:
    assert wordnet.synonyms("movie") == ("film", "picture", "moving_picture")
    assert wordnet.synonyms("great") == ("outstanding", "big", "Large")
    assert wordnet.synonyms("picture") == ("movie", "film", "moving_picture", "image")
    assert wordnet.synonyms("galore") == ("abounding",)  # the adjective's marker is no part of it
    assert wordnet.synonyms("seldom") == ("rarely",)
    assert wordnet.synonyms("zzz") == ()


def test_base_forms_are_found_as_morphy_does(wordnet: WordNet) -> None:
    assert wordnet.synonyms("movies") == ("film", "picture", "moving_picture")
    assert wordnet.synonyms("stories") == ("tale",)  # an irregular form
    assert wordnet.synonyms("looked") == wordnet.synonyms("looking") == ("appear", "seem")


def test_wordnet_files_that_are_missing_or_do_not_belong_together_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="apt install wordnet-base"):
        find_wordnet(tmp_path)
    folder = world.write_wordnet(tmp_path / "wn")
    monkeypatch.setenv("WNSEARCHDIR", str(folder))
    assert find_wordnet() == folder
    (folder / "data.noun").write_text("  1 licence\n" + (folder / "data.noun").read_text())
    with pytest.raises(UserError, match=r"data\.noun: no synset of .* where index\.noun says"):
        read_wordnet(folder)
    (folder / "index.noun").write_text("movie n\n")
    with pytest.raises(UserError, match=r"index\.noun, line 1: not a line of a WordNet index"):
        read_wordnet(folder)


def test_neighbours_are_read_up_to_a_limit_and_other_files_refused(tmp_path: Path) -> None:
    path = world.write_neighbours(tmp_path / "n.json.gz")
    assert read_neighbours(path, limit=2).synonyms("movie") == ["film", "movies"]
    assert read_neighbours(path).synonyms("unheard") == ()
    for name, content in {"a.json": "[1]", "b.json": "no", "c.json": '{"a": [1]}'}.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match="--neighbours"):
            read_neighbours(tmp_path / name)
    with pytest.raises(UserError, match="no such file"):
        read_neighbours(tmp_path / "absent.json")


def test_an_attack_without_its_word_list_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the attack cf8 needs a list of neighbours"):
        word_lists(["cf8"], None, None)
    with pytest.raises(UserError, match="textfooler is not built in"):
        word_lists(["textfooler"], None, None)
    with pytest.raises(UserError, match="Did you mean 'pwws'"):
        word_lists(["pwvs"], None, None)


def test_words_keep_their_case_and_stop_words_stay(wordnet: WordNet) -> None:
    assert (in_case_of("film", "Movie"), in_case_of("film", "MOVIE"), in_case_of("film", "movie")) == ("Film", "FILM", "film")
    assert candidates("Movie", wordnet.synonyms) == ["Film", "Picture"]  # two words in one are left out
    assert candidates("great", wordnet.synonyms) == ["outstanding", "big", "large"]
    assert candidates("is", read_neighbours_of_is) == []
    assert not may_change("n't")
    assert not may_change(".")
    assert "not" in STOP_WORDS
    assert exchange(["a", "fine", "film"], [Change(1, "fine", "great")]) == "a great film"


def read_neighbours_of_is(word: str) -> list[str]:
    return ["are"]
