"""`isotrain --lang zh`: what people read in Chinese, what programs read in English."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from isotrain.cli.main import app

MACHINES = Path(__file__).parents[1] / "doctor" / "machines"
OTHER_LOCALE = {"ISOTRAIN_LANG": "", "LC_ALL": "", "LC_MESSAGES": "", "LANG": ""}


def isotrain(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100", **OTHER_LOCALE, **variables})


def test_findings_in_chinese() -> None:
    result = isotrain("--lang", "zh", "doctor", str(MACHINES / "mask-out-of-order"))
    assert result.exit_code == 1
    for words in (
        "机器    x86_64, Python 3.11.9",
        "软件包  ray 2.60.0",
        "错误  ASCEND_RT_VISIBLE_DEVICES=1,0,2 不是严格升序，因此设备数为 0",
        "      -> export ASCEND_RT_VISIBLE_DEVICES=0,1,2",
        "还有 6 条说明：isotrain doctor --notes",
        "有 1 个问题使训练无法在 npu 上进行",
    ):
        assert words in result.output, result.output


def test_rules_and_the_nearest_stack_in_chinese() -> None:
    result = isotrain("--lang", "zh", "doctor", str(MACHINES / "openrlhf-0.6.2"))
    for words in (
        "torch_npu 2.5.1 及更旧的版本已停止维护",
        "最接近的完整版本组合：vllm-ascend 0.23.0（已发布）",
        "    # 安装 CANN 9.1.0",
        "    pip install torch==2.10.0\n",
    ):
        assert words in result.output, result.output


@pytest.mark.parametrize("machine", sorted(path.name for path in MACHINES.iterdir() if path.is_dir()))
def test_no_finding_is_left_in_english(machine: str) -> None:
    result = isotrain("--lang", "zh", "doctor", str(MACHINES / machine), "--notes")
    english = isotrain("doctor", str(MACHINES / machine), "--json")
    for finding in json.loads(english.output)["findings"]:
        for text in (finding["problem"], finding["remedy"]):
            if len(text.split()) > 6:  # shorter ones may be commands
                assert text not in " ".join(result.output.split())


def test_json_stays_english() -> None:
    one, other = (
        isotrain("--lang", language, "doctor", str(MACHINES / "mask-out-of-order"), "--json")
        for language in ("en", "zh")
    )
    assert one.output == other.output and "is not strictly ascending" in one.output


@pytest.mark.parametrize(
    ("arguments", "variables", "chinese"),
    [
        ([], {}, False),
        ([], {"LANG": "zh_CN.UTF-8"}, True),
        ([], {"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, False),
        ([], {"LANG": "en_US.UTF-8", "ISOTRAIN_LANG": "zh"}, True),
        ([], {"LANG": "zh_CN.UTF-8", "ISOTRAIN_LANG": "en"}, False),
        (["--lang", "en"], {"LANG": "zh_CN.UTF-8", "ISOTRAIN_LANG": "zh"}, False),
        (["--lang", "zh"], {"LANG": "C", "ISOTRAIN_LANG": "en"}, True),
    ],
)
def test_who_chooses_the_language(arguments: list[str], variables: dict[str, str], chinese: bool) -> None:
    output = isotrain(*arguments, "doctor", str(MACHINES / "good-a2"), **variables).output
    assert ("没有问题妨碍在 npu 上训练" in output) is chinese
    assert ("no problem prevents training on npu" in output) is not chinese


def test_a_language_that_there_is_not() -> None:
    result = isotrain("--lang", "fr", "doctor")
    assert result.exit_code == 2 and "'fr'" in result.output
    assert isotrain("doctor", ISOTRAIN_LANG="fr").exit_code == 2


def test_the_choice_ends_with_the_command() -> None:
    isotrain("--lang", "zh", "doctor", str(MACHINES / "good-a2"))
    assert "no problem prevents" in isotrain("doctor", str(MACHINES / "good-a2")).output
