"""RAPTOR, MemTree, HippoRAG 2, A-Mem and Mem0: each mechanism against a case worked out by hand or an oracle."""

import re
from itertools import pairwise

import igraph
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from memloc.baseline_trees import (
    BEHIND,
    TIE,
    AMem,
    GrowingTree,
    HippoRAG2,
    HippoSettings,
    Mem0,
    Mem0Settings,
    MemTree,
    Note,
    Phrases,
    Raptor,
    RaptorSettings,
    collapsed_scores,
    entity_boost,
    filter_facts,
    fused,
    layer_clusters,
    link_notes,
    pack,
    phrase_graph,
    read_note,
    reduce_dimensions,
    restart_mass,
    session_facts,
    session_pieces,
    soft_clusters,
    turn_pieces,
    weighted_transition,
    with_links,
)
from memloc.baselines import BASELINES, ModelWriter, Session, Tools, rank_conversation
from memloc.chat import LLMError, Reply
from memloc.graph_ppr import propagate

CLASSES = (Raptor, MemTree, HippoRAG2, AMem, Mem0)


class WordEncoder:
    "A dimension for each word, given out as words come; a word is a token."

    dim = 400

    def __init__(self):
        self.place: dict[str, int] = {}

    def encode(self, texts):
        out = np.zeros((len(texts), self.dim))
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()):
                out[row, self.place.setdefault(word, len(self.place)) % self.dim] += 1
            out[row, self.dim - 1] += 1e-6
        return out/np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-12)

    def n_tokens(self, texts):
        return [len(text.split()) + 2 for text in texts]


class Scripted:
    "A chat model that answers by a function of the prompt."

    name, key, context = "scripted", "scripted", 8192

    def __init__(self, say):
        self.say = say

    def count_tokens(self, messages):
        return sum(len(message["content"].split()) for message in messages)

    def chat(self, batch, sampling, on_reply=None):
        said = [self.say(messages[0]["content"], messages[1]["content"]) for messages in batch]
        return [Reply(one, n_prompt_tokens=10, n_completion_tokens=2) if isinstance(one, str) else one for one in said]


TOPICS = {"kayak": "paddle river boat", "soup": "carrots pot spoon", "violin": "strings concert bow", "garden": "roses soil shovel"}


def history(n_sessions=8, n_turns=5):
    "Sessions that take turns with four topics, each with a number of its own."
    words = list(TOPICS.items())
    return [Session(f"s{i}", f"{i + 1} May 2023", tuple(
        f"{('Ana', 'Bo')[t % 2]}: The {words[i % 4][0]} needed {words[i % 4][1]} on round {i} part {t} again." for t in range(n_turns)))
        for i in range(n_sessions)]


@pytest.fixture
def tools():
    return Tools(WordEncoder())


class TestPieces:
    @settings(deadline=None)
    @given(st.lists(st.integers(1, 12), max_size=30), st.integers(1, 15), st.integers(0, 10))
    def test_groups_cover_everything_and_fit(self, sizes, limit, overlap):
        groups = pack(sizes, limit, overlap)
        assert sorted({i for group in groups for i in group}) == list(range(len(sizes)))
        for before, after in pairwise(groups):
            assert after[0] > before[0] and after[-1] > before[-1]
            assert sum(sizes[i] for i in before if i in after) <= overlap
        assert all(len(group) == 1 or sum(sizes[i] for i in group) <= limit for group in groups)

    def test_a_long_turn_keeps_every_word_and_its_speaker(self):
        turn = "Ana: One two three. Four five six seven eight nine. Ten."
        pieces = turn_pieces(turn, lambda text: len(text.split()), 4)
        assert all(piece.startswith("Ana: ") for piece in pieces)
        assert " ".join(piece.removeprefix("Ana: ") for piece in pieces) == turn.removeprefix("Ana: ")

    def test_a_chunk_never_spans_two_sessions(self, tools):
        sessions = [Session("a", None, ("A: one.", "A: two.")), Session("b", None, ()), Session("c", None, ("B: three.",))]
        assert session_pieces(sessions, tools, 100) == (["A: one.\nA: two.", "B: three."], [0, 2])


class TestCollapsedTree:
    def test_best_node_first_then_the_own_leaf(self):
        scores = collapsed_scores(np.array([[0.2, 0.6, 0.5, 0.7]]), [[0], [1], [2], [0, 2]], [0, 1, 2], 4)[0]
        assert scores[:3] == pytest.approx([0.7 + 0.2*TIE, 0.6 + 0.6*TIE, 0.7 + 0.5*TIE], abs=1e-12)
        assert np.isnan(scores[3])
        assert np.argsort(-scores[:3]).tolist() == [2, 0, 1]


class TestRaptor:
    def test_the_seed_is_that_of_the_tools_unless_the_caller_chose_one(self, tools):
        for chosen, seed, used in ((RaptorSettings(), 5, 5), (RaptorSettings(seed=7), 5, 7), (RaptorSettings(), 224, 224)):
            raptor = Raptor(chosen)
            raptor.build([Session("s0", None, ("Nora: the boat", "Dev: the sea"))], Tools(tools.encoder, seed=seed))
            assert raptor.settings.seed == used

    def test_principal_components_keep_distances_of_flat_data(self):
        rng = np.random.default_rng(1)
        flat = rng.normal(size=(30, 3)) @ np.linalg.qr(rng.normal(size=(20, 3)))[0].T
        points = reduce_dimensions(flat, 10)
        apart = np.linalg.norm(flat[:, None] - flat[None], axis=2)
        assert np.allclose(np.linalg.norm(points[:, None] - points[None], axis=2), apart)
        assert reduce_dimensions(flat[:4], 10).shape == (4, 4)

    def test_the_lowest_bic_of_all_sizes_is_found_without_trying_all(self):
        from sklearn.mixture import GaussianMixture
        rng = np.random.default_rng(3)
        points = np.concatenate([rng.normal(centre, 0.5, (30, 2)) for centre in ((0, 0), (6, 0), (0, 6), (6, 6))])
        bics = [GaussianMixture(n, covariance_type="spherical", random_state=224).fit(points).bic(points) for n in range(1, 15)]
        assert len(soft_clusters(points, RaptorSettings())) == 1 + int(np.argmin(bics)) == 4

    def test_every_point_belongs_somewhere_even_below_the_threshold(self):
        points = np.random.default_rng(0).normal(size=(60, 2))
        found = soft_clusters(points, RaptorSettings(threshold=0.999))
        assert sorted({int(i) for members in found for i in members}) == list(range(60))

    @pytest.mark.parametrize("vectors", [np.ones((40, 6)), np.random.default_rng(0).normal(size=(40, 6))], ids=["equal", "random"])
    def test_clusters_respect_the_token_limit_and_end(self, vectors):
        sizes = [100]*40
        found = layer_clusters(vectors, sizes, RaptorSettings(cluster_tokens=750))
        assert sorted({i for members in found for i in members}) == list(range(40))
        assert all(sum(sizes[i] for i in members) <= 750 for members in found)

    def test_the_tree(self, tools):
        raptor = Raptor(RaptorSettings(chunk_tokens=30, n_dimensions=3))
        raptor.build(history(), tools)
        n = raptor.n_chunks
        assert raptor.layers[0] == list(range(n)) and len(raptor.layers) >= 2
        assert all(tools.count(text) <= 30 for text in raptor.texts[:n])
        for node in raptor.layers[1]:  # sessions of a summary are those of its chunks; its words come from them
            said = set(" ".join(raptor.texts[i] for i in range(n) if raptor.members[i] <= raptor.members[node]).split())
            assert set(raptor.texts[node].split()) <= said
        assert tools.cost.n_calls == len(raptor.texts) - n

    def test_at_most_so_many_layers_and_none_for_few_chunks(self, tools):
        raptor = Raptor(RaptorSettings(chunk_tokens=20, n_dimensions=2, max_layers=1))
        raptor.build(history(), tools)
        assert len(raptor.layers) == 2
        raptor = Raptor()
        raptor.build(history(2, 1), tools)
        assert len(raptor.layers) == 1 and len(raptor.texts) == raptor.n_chunks

    def test_a_summary_written_by_a_model_is_what_is_searched(self):
        model = Scripted(lambda rules, text: "zeppelin" if "violin" in text else "nothing of note")
        tools = Tools(WordEncoder(), ModelWriter(model))
        settings = RaptorSettings(chunk_tokens=30, n_dimensions=2)
        raptor = Raptor(settings)
        raptor.build(history(), tools)
        scores = raptor.search(["zeppelin"], tools)[0]
        wanted = {session for node in range(raptor.n_chunks, len(raptor.texts)) if raptor.texts[node] == "zeppelin" for session in raptor.members[node]}
        assert {2, 6} <= wanted and {int(i) for i in np.flatnonzero(scores > 0.9)} == wanted


def angle(*degrees):
    return [np.array([np.cos(np.radians(one)), np.sin(np.radians(one))]) for one in degrees]


class TestGrowingTree:
    def test_by_hand(self):
        tree = GrowingTree(base=0.5, rate=0.2)  # thresholds 0.5, 0.61, 0.75: angles up to 60, 52.4 and 41.8 degrees
        for item, vector in enumerate(angle(0, 170, 55, 60)):
            tree.insert(vector, item)
        # 0 and 1 at the root; 2 is 55 degrees from 0: split; its node now points to 27.5 degrees.
        # 3 is 32.5 degrees from that node, and 5 from item 2 below it: split again.
        found = [(node.parent, node.depth, node.item, node.n_items) for node in tree.nodes[1:]]
        assert found == [(0, 1, -1, 3), (0, 1, 1, 1), (1, 2, 0, 1), (1, 2, -1, 2), (4, 3, 2, 1), (4, 3, 3, 1)]
        mean = np.sum(angle(0, 55, 60), axis=0)
        assert np.allclose(tree.nodes[1].vector, mean/np.linalg.norm(mean))

    def test_a_high_threshold_makes_a_flat_tree(self):
        tree = GrowingTree(base=1.1)
        for item, vector in enumerate(angle(0, 0, 10)):
            tree.insert(vector, item)
        assert [node.depth for node in tree.nodes] == [0, 1, 1, 1]

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.integers(0, 359), min_size=1, max_size=25), st.floats(0.1, 0.9))
    def test_what_always_holds(self, degrees, base):
        tree, vectors = GrowingTree(base=base), angle(*degrees)
        for item, vector in enumerate(vectors):
            tree.insert(vector, item)
        leaves = [place for place, node in enumerate(tree.nodes) if node.item >= 0]
        assert sorted(tree.nodes[leaf].item for leaf in leaves) == list(range(len(degrees)))
        for place, node in enumerate(tree.nodes[1:], start=1):
            below = [tree.nodes[leaf].item for leaf in leaves if place in (leaf, *tree.above(leaf))]
            assert node.n_items == len(below) and (node.item >= 0) == (not node.children)
            assert len(node.children) != 1 and node.depth == tree.nodes[node.parent].depth + 1
            total = np.sum([vectors[item] for item in below], axis=0)
            assert np.allclose(node.vector, total/max(np.linalg.norm(total), 1e-12), atol=1e-9)


class TestMemTree:
    def test_each_turn_is_a_leaf_and_each_inner_node_has_a_text(self, tools):
        memtree = MemTree()
        memtree.build(history(), tools)
        nodes = memtree.tree.nodes
        assert sorted(memtree.texts) == list(range(1, len(nodes)))
        assert sum(node.item >= 0 for node in nodes) == 40
        assert tools.cost.n_calls == sum(bool(node.children) for node in nodes[1:])
        assert memtree.members[0] >= {0}

    def test_rewriting_each_time_asks_once_for_each_node_above(self):
        turns = [Session("a", None, ("A: red kayak here", "A: red kayak there", "A: red kayak now", "B: soup"))]
        replies = iter(["A: red kayak one", "A: red kayak two", "A: red kayak three", *["A: red kayak more"]*9])
        seen = []
        tools = Tools(WordEncoder(), ModelWriter(Scripted(lambda rules, text: seen.append(text) or next(replies))))
        memtree = MemTree(base=0.7, rate=0.0, rewrite="each")
        memtree.build(turns, tools)
        assert seen[0] == "A: red kayak here\nA: red kayak there"        # the split leaf's text and the new turn
        # the third turn goes to the node, whose text is now "one", and from there to the first leaf, which is split
        assert seen[1:] == ["A: red kayak here\nA: red kayak now", "A: red kayak one\nA: red kayak now"]
        assert memtree.texts[1] == "A: red kayak three"
        assert np.allclose(memtree.tree.nodes[1].vector, tools.encode([memtree.texts[1]])[0])
        assert memtree.tree.nodes[memtree.tree.nodes[0].children[-1]].item == 3


class TestPhrases:
    def test_names_speakers_and_key_phrases(self, tools):
        sessions = [Session("s", None, ("Ana: We met Otto Lind at the support groups.", "Bo: Then, Greta called. Rain came."))]
        phrases = Phrases(sessions, tools)
        assert {"Ana", "Bo", "Otto Lind", "Greta"} <= set(phrases.texts)
        assert [phrases.texts[i] for i in phrases.inside(["Was Otto Lind there?"])[0]].count("Otto Lind") == 1
        (found,) = phrases.inside(["a support group"])
        assert any("support" in phrases.texts[i].lower() for i in found)
        assert phrases.inside(["", "zebra"]) == [[], []]

    def test_one_place_for_one_stem(self, tools):
        phrases = Phrases([Session("s", None, ("Ana: I saw Painters there.",)), Session("t", None, ("Ana: I saw Painter there.",))], tools)
        assert sum("paint" in text.lower() and " " not in text for text in phrases.texts) == 1


class TestHippoRAG:
    def test_graph_by_hand(self):
        vectors = np.array([[1, 0], [0.8, 0.6], [0, 1]])
        weights = phrase_graph(3, [[0, 2], [2, 0], [1]], [[0, 1], []], vectors).toarray()
        expected = np.zeros((5, 5))
        for (first, second), value in {(0, 2): 2, (0, 3): 1, (1, 3): 1, (0, 1): 0.8}.items():
            expected[first, second] = expected[second, first] = value
        assert np.allclose(weights, expected)
        transition = weighted_transition(sp.csr_matrix(expected)).toarray()
        assert np.allclose(transition.sum(0), 1) and transition[4, 4] == 1
        assert transition[2, 0] == pytest.approx(2/3.8) and transition[0, 2] == 1

    def test_restart_by_hand(self):
        # facts 0 and 1 are kept; phrase 1 is in both (mean 0.5), and in two passages: 0.25
        mass = restart_mass(np.array([[0.8, 0.2, 0.0]]), [[0, 1], [1], [2]], [[0], [1], [1, 2]], np.array([[0.1, 0.3, 0.5]]), 3)
        assert np.allclose(mass.ravel(), np.array([0.8, 0.25, 0, 0, 0.025, 0.05])/1.125)
        assert restart_mass(np.zeros((1, 1)), [[0]], [[0]], np.array([[0.4]]), 1).sum() == 0

    def test_the_walk_is_igraphs_personalised_pagerank(self):
        rng = np.random.default_rng(5)
        half = sp.random(20, 20, 0.2, random_state=5).tocsr()
        weights = sp.triu(half, 1) + sp.triu(half, 1).T
        weights = weights.tocsr()
        seeds = rng.random(20)
        seeds /= seeds.sum()
        mine = propagate(weighted_transition(weights), seeds[:, None], 0.5)[:, 0]
        upper = sp.triu(weights, 1).tocoo()
        graph = igraph.Graph(n=20, edges=list(zip(upper.row.tolist(), upper.col.tolist())))
        graph.add_edges([(node, node) for node in range(20) if graph.degree(node) == 0])  # keep their mass, as ours do
        links = [*upper.data.tolist(), *[1.0]*(graph.ecount() - upper.nnz)]
        reference = graph.personalized_pagerank(damping=0.5, reset=seeds.tolist(), weights=links, directed=False, implementation="prpack")
        assert np.allclose(mine, reference, atol=1e-8)

    def test_the_filter_by_cosine_and_by_model(self, tools):
        similarity = np.array([[0.9, 0.3, 0.5, 0.45]])
        kept = filter_facts(["Why?"], list("abcd"), similarity, tools, 3, 0.48)
        assert kept.tolist() == [[0.9, 0, 0.5, 0]]
        seen = []
        replies = iter(["2, 3", "none", LLMError("empty", "no words"), "fact 9"])
        asked = Tools(WordEncoder(), ModelWriter(Scripted(lambda rules, text: seen.append(text) or next(replies))))
        kept = filter_facts(["Why?"]*4, list("abcd"), np.repeat(similarity, 4, 0), asked, 3, 0.48)
        assert kept.tolist() == [[0, 0, 0.5, 0.45], [0]*4, [0.9, 0, 0.5, 0], [0]*4]  # a failed model: by cosine
        assert seen[0] == "Question: Why?\n1. a\n2. c\n3. d"

    def test_a_link_through_a_phrase_beats_similarity(self, tools):
        sessions = [Session("s0", None, ("Ana: My sister Greta moved to Oslo.",)), Session("s1", None, ("Ana: Yesterday, Oslo drowned in snowfall.",)),
                    Session("s2", None, ("Ana: Lentils and rice for dinner.",))]
        hippo = HippoRAG2(HippoSettings(fact_cut=0.15, passage_weight=0.0))
        hippo.build(sessions, tools)
        scores = hippo.search(["Where did Greta move?"], tools)[0]
        assert hippo.linked.all() and scores.argmax() == 0 and scores[1] > scores[2]

    def test_without_a_fact_it_is_dense_retrieval(self, tools):
        sessions = history(3)
        hippo = HippoRAG2(HippoSettings(fact_cut=2.0))
        hippo.build(sessions, tools)
        scores = hippo.search(["violin strings?"], tools)
        turns = [turn for session in sessions for turn in session.turns]
        dense = (tools.encode(["violin strings?"]) @ tools.encode(turns).T).reshape(3, 5).max(1)
        assert not hippo.linked.any() and np.allclose(scores[0], dense)


class TestAMem:
    def test_links_go_both_ways_to_earlier_notes_only(self):
        notes = [Note(f"turn {i}", [f"word{i}"], "") for i in range(4)]
        link_notes(notes, np.array(angle(0, 90, 20, 85)), n_links=2, cut=0.9)
        assert [note.links for note in notes] == [[2], [3], [0], [1]]
        assert notes[0].tags == ["word2"] and notes[3].tags == []
        assert notes[0].text == "turn 0\nword0, word2"

    def test_tags_are_limited_and_not_repeated(self):
        notes = [Note("a", ["same"], ""), *[Note("b", ["same", f"new{i}"], "") for i in range(5)]]
        link_notes(notes, np.ones((6, 1)), max_tags=3)
        assert notes[0].tags == ["same", "new0", "new1"]

    @pytest.mark.parametrize("said, keywords, context", [
        (None, ["rule"], "before"), ("", ["rule"], "before"), ("Keywords: red kayak, river\nAna bought it.", ["red kayak", "river"], "Ana bought it."),
        ("kayak, river", ["kayak", "river"], ""), ("Ana talks about the river", ["rule"], "Ana talks about the river")])
    def test_reading_a_note(self, said, keywords, context):
        note = read_note("turn", said, ["rule"], "before")
        assert (note.keywords, note.context) == (keywords, context)

    def test_linked_notes_stand_behind_the_one_that_brought_them(self):
        notes = [Note("a", [], "", links=[2]), Note("b", [], ""), Note("c", [], "", links=[0]), Note("d", [], "", links=[1])]
        raised = with_links(np.array([[0.9, 0.5, 0.1, 0.2]]), notes, n_top=1)
        assert raised.tolist() == [[0.9, 0.5, 0.9 - BEHIND, 0.2]]

    def test_with_a_model_notes_and_query_are_its_words(self):
        def say(rules, text):
            return "zeppelin" if text.startswith("What flies") else "airship\nIt flies." if "violin" in text else "thing\nNothing."
        tools = Tools(WordEncoder(), ModelWriter(Scripted(say)))
        amem = AMem(cut=2.0)
        amem.build(history(4), tools)
        assert amem.notes[10].text == f"{amem.notes[10].turn}\nairship\nIt flies."
        assert (amem.search(["What flies?"], tools) < 0.01).all()  # the query became a word that no note holds


class TestMem0:
    def test_boost_and_sum_by_hand(self):
        boost = entity_boost([[0, 1], [2], []], [[0], [0], [0, 1], [0]], 3)
        assert boost.tolist() == [[0.5, 0.5, 1.0, 0.5], [0]*4, [0]*4]
        dense, lexical = np.array([[0.5, 0.09, 0.1]]), np.array([[2.0, 8.0, 0.0]])
        total = fused(dense, lexical, np.array([[0.0, 1.0, 1.0]]), Mem0Settings())
        assert np.allclose(total, [[(0.5 + 0.25)/2.5, (0.09 + 1 + 0.5)/2.5 - 2, (0.1 + 0.5)/2.5]])
        assert np.isfinite(fused(dense, 0*lexical, 0*dense)).all()

    def test_facts_are_only_added_once_each_and_questions_are_none(self, tools):
        sessions = [Session("a", None, ("Ana: I live in Oslo right now.", "Bo: Do you like it there?", "Ana: I live in Oslo right now.")),
                    Session("b", None, ("Ana: I live in Rome right now.", "Ana: I live in Oslo right now."))]
        facts, owners = session_facts(sessions, tools, 100)
        assert facts == ["Ana: I live in Oslo right now.", "Ana: I live in Rome right now."] and owners == [0, 1]

    def test_a_models_list_is_read_line_by_line(self):
        tools = Tools(WordEncoder(), ModelWriter(Scripted(lambda rules, text: "- Ana has a kayak.\n\n* Bo cooks.")))
        assert session_facts([Session("a", None, ("Ana: hm",))], tools, 50)[0] == ["Ana has a kayak.", "Bo cooks."]

    def test_words_and_entities_count_beside_similarity(self, tools):
        sessions = [Session("a", None, ("Ana: The blue kayak went down the long river.",)), Session("b", None, ("Bo: A pot of soup fed the whole house.",))]
        mem0 = Mem0()
        mem0.build(sessions, tools)
        assert mem0.search(["Which kayak?", "What did Bo cook, soup?"], tools).argmax(1).tolist() == [0, 1]


class TestAll:
    def test_registered_with_source_and_departures(self):
        for cls in CLASSES:
            assert BASELINES[cls.name] is cls and cls.writes and cls.departures
            assert all(sentence.endswith(".") for sentence in cls.departures)

    @pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.name)
    def test_same_twice_and_finds_the_topic(self, cls):
        runs = []
        for _ in range(2):
            tools, baseline = Tools(WordEncoder()), cls()
            baseline.build(history(), tools)
            runs.append(baseline.search(["violin strings concert bow", "carrots pot spoon"], tools))
        assert np.array_equal(*runs)
        for row, wanted in zip(runs[0], ({2, 6}, {1, 5}), strict=True):
            assert set(np.argsort(-row)[:2].tolist()) == wanted

    @pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.name)
    @pytest.mark.parametrize("sessions", [
        [], [Session("a", None, ())], [Session("a", None, ()), Session("b", None, ("Ana: Hm.",))], [Session("a", None, ("?!",)), Session("b", None, ("Ana: kayak",))],
        [Session("a", None, ("Ana: We went to the river.",))]*3], ids=["none", "empty", "one turn", "no words", "all the same"])
    def test_little_to_read(self, cls, sessions, tools):
        for questions in ([], ["Which kayak?"]):
            ranking, cost = rank_conversation(cls, "c", sessions, [f"q{i}" for i in range(len(questions))], questions, tools)
            assert ranking.height == len(questions)*len(sessions) and cost["system"] == f"{cls.name} (extractive)"

    @pytest.mark.slow
    @pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.name)
    def test_a_long_history_builds_in_seconds(self, cls):
        import time
        tools, sessions = Tools(WordEncoder()), history(50, 12)
        started = time.process_time()
        baseline = cls()
        baseline.build(sessions, tools)
        baseline.search(["violin strings?"]*50, tools)
        assert time.process_time() - started < 10
