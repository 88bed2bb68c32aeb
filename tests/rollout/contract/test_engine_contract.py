"""Every engine follows the same contract; docs/weight-sync.md has it as a table."""

from __future__ import annotations

from typing import Any

import pytest
from contract_rows import BAD, TOLERANCE, check_bad_update, check_listening, check_same_weights

from support import needs_vllm


@pytest.fixture(
    params=[
        pytest.param("vllm", marks=[pytest.mark.vllm, needs_vllm]),
        pytest.param("sglang", marks=pytest.mark.slow),
        pytest.param("hf", marks=pytest.mark.heavy),
    ]
)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def found(engine: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    result: dict[str, Any] = request.getfixturevalue(f"{engine}_found")
    return result


def test_the_same_weights_give_the_same_log_probs(found: dict[str, Any]) -> None:
    check_same_weights(found)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_update_is_refused_and_the_next_good_one_taken(found: dict[str, Any], name: str) -> None:
    check_bad_update(found, name)


def test_what_is_wrong_with_an_update_is_said(found: dict[str, Any]) -> None:
    for name, part in {
        "truncated": "bytes of tensors",
        "flipped": "is damaged: digest",
        "not delivered": "was announced but is not there",
        "without model.norm": "lacks weights of",
        "skipped": "the file holds version",
    }.items():
        assert part in found["bad"][name]["error"]


def test_responses_depend_on_their_seed_alone(found: dict[str, Any]) -> None:
    responses = found["responses"]
    assert responses["count"] == responses["distinct"] == 16
    assert responses["same_alone"]  # by seed, whatever shares the batch
    assert responses["same_one_by_one"]  # and whenever it was asked for
    assert responses["prompts_kept"]


def test_greedy_responses_are_the_best_tokens(found: dict[str, Any]) -> None:
    responses = found["responses"]
    assert responses["greedy_is_best"] and responses["greedy_pairs_equal"]
    assert responses["greedy_difference"] <= TOLERANCE


def test_log_probs_are_of_the_distribution_that_was_sampled(found: dict[str, Any]) -> None:
    assert found["responses"]["top_k_1_logp"] == 0  # the only token left is certain
    assert found["uniform"]["logp_error"] < 1e-5


def test_ends(found: dict[str, Any]) -> None:
    uniform = found["uniform"]
    assert 0 < sum(uniform["finished"]) < len(uniform["finished"])
    assert uniform["finished"] == uniform["last_is_end"]
    assert uniform["inner_ends"] == 0
    # Also at the end of a turn that the chat template alone knows; it is the last token of the response.
    assert 0 < uniform["ends_of_turns"] <= sum(uniform["finished"])
    cut = [n for n, finished in zip(uniform["lengths"], uniform["finished"], strict=True) if not finished]
    assert set(cut) == {60}
    assert min(uniform["lengths"]) < 60


def test_the_longest_prompt_with_the_longest_response(found: dict[str, Any]) -> None:
    lengths = found["lengths"]
    assert lengths["longest"] == 96
    assert lengths["difference"] <= TOLERANCE


def test_a_token_outside_the_vocabulary_is_refused_and_survived(found: dict[str, Any]) -> None:
    assert found["lengths"]["outside"].startswith("RolloutError: engine 7: ")
    assert found["lengths"]["after"] == 1


def test_episodes_of_several_turns(found: dict[str, Any]) -> None:
    assert found["turns"]["difference"] <= TOLERANCE


def test_sleep_and_wake(found: dict[str, Any], engine: str) -> None:
    # On the host the others keep their weights, and go on.
    assert ("it slept, and has no weights" in found["sleeps"]["asleep"]) == (engine == "sglang")
    assert found["sleeps"]["difference"] <= TOLERANCE


def test_refuses_calls_while_an_iterator_is_open(found: dict[str, Any]) -> None:
    abandoned = found["abandoned"]
    assert "is generating" in abandoned["second"]
    assert abandoned["update"].startswith("WeightUpdateError: engine 7 is generating")
    assert abandoned["difference"] <= TOLERANCE


def in_flight(found: dict[str, Any], engine: str) -> dict[str, Any]:
    result: dict[str, Any] = found["in_flight"]
    assert result["can"] == (engine != "sglang")
    if engine == "sglang":
        pytest.skip("it takes weights between responses")
    return result


def test_an_update_in_flight_to_the_same_weights_changes_nothing(found: dict[str, Any], engine: str) -> None:
    assert in_flight(found, engine)["same"] == {"tokens": True, "logps": True, "two_versions": True}


def test_each_token_has_the_version_that_wrote_it(found: dict[str, Any], engine: str) -> None:
    early, some, *late = in_flight(found, engine)["other"]
    assert set(early["firsts"].values()) == {0} and early["versions"] == [0]
    assert early["difference"] <= 10 * TOLERANCE
    for updated in (some, *late):
        assert updated["versions"] == [-1, 0]
        begun = [n for key, n in updated["firsts"].items() if n < updated["lengths"][key]]
        assert len(set(begun)) == 1, "all were at the same token"
        if engine == "hf":  # asked before the first token, and after each
            assert set(begun) == {updated["calls"] - 1}
        # As of a model that keeps its cache; were a token's version wrong, its log-prob would be too.
        assert updated["difference"] <= 10 * TOLERANCE
        assert updated["difference_one_earlier"] >= 100 * TOLERANCE
        assert updated["scored"] <= TOLERANCE


def test_what_begins_after_an_update_sees_nothing_of_old_weights(found: dict[str, Any], engine: str) -> None:
    for updated in in_flight(found, engine)["other"]:
        assert updated["version_of_later"] == [0] and updated["begun_later"] <= TOLERANCE


def test_an_update_that_fails_in_flight_ends_the_generation(found: dict[str, Any], engine: str) -> None:
    failed = in_flight(found, engine)["failed"]
    assert failed["update"].startswith("WeightUpdateError: engine 7: ")
    assert failed["generation"].startswith("RolloutError: engine 7 does not generate: ")


def test_it_listens_on_the_loopback_only(found: dict[str, Any], engine: str) -> None:
    if engine == "sglang":  # the store in which its workers meet, torch's own, listens on all interfaces
        (store,) = (address for address in found["listening"] if address.startswith("*:"))
        found = {**found, "listening": [address for address in found["listening"] if address != store]}
    check_listening(found)


@pytest.mark.slow
def test_a_dead_server_is_told(sglang_found: dict[str, Any]) -> None:
    assert sglang_found["death"]["first"].startswith("EngineLost: engine 7: its server ended by SIGKILL")
    assert sglang_found["death"]["then"].startswith("EngineLost: engine 7 lost its server")
