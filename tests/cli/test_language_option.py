"""`isotrain --lang zh`: what people read in Chinese, what programs read in English."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner, Result

from isotrain.cli.main import app

MACHINES = Path(__file__).parents[1] / "tools" / "doctor" / "machines"
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


RECIPE = """\
name: my run
output: out
model: {path: x, lora: 8}
data:
  train: [a, 3]
  max_lenght: 5
  batch_size: "3"
algorithm: {name: grpo, lam: 3}
rollout: {n: 1.0}
trainer: {checkpoint_storage: "s3://me:secret@host/x"}
"""


def test_recipe_errors_in_chinese(tmp_path: Path) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    result = isotrain("--lang", "zh", "train", str(recipe), "--dry-run", "rollout.engine=", "no", "x=[")
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        f"错误：{recipe}:1: 'name' 的值是文本 'my run'；"
        "应为由字母、数字和 . _ + - 组成、以字母或数字开头的文本",
        f"{recipe}:3: 'model.lora' 的值是 8；应为一节，其中的 key 例如 rank, alpha, targets, dropout",
        f"{recipe}:5: 'data.train' 的第 2 项的值是 3；应为文本；请加引号：\"3\"",
        f"{recipe}:6: 未知的 key 'data.max_lenght'；您是否想写 'data.max_length'？",
        f"{recipe}:7: 'data.batch_size' 的值是文本 '3'；应为整数，不小于 1；请写 3，不加引号",
        f"{recipe}:8: 未知的 key 'algorithm.lam'；它属于 ppo，不属于 grpo：请去掉",
        f"{recipe}:9: 'rollout.n' 的值是 1.0；应为整数，不小于 1；请写 1",
        f"{recipe}:10: 'trainer.checkpoint_storage': 其中含有凭据或参数；请通过该存储的环境变量或文件提供",
        f"{recipe}: 缺少 'reward'；grpo 需要它来给回复打分：请写 'reward: {{gsm8k: {{}}}}'",
        "覆盖项 'rollout.engine=': '=' 后面没有内容；没有值请写 rollout.engine=null，"
        "空文本请写 rollout.engine='\"\"'",
        "覆盖项 'no': 应为 key=value，例如 optimizer.lr=1e-4",
        "覆盖项 'x=[': 不是合法的 YAML：第 1 行打开的括号或引号没有闭合",
    ]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.n=1"], "rollout.n（1）太小：grpo 要比较回复，请设为 2 或更大"),
        (["rollout.staleness=1"], "这需要单独的设备：请设 cluster.placement: separate"),
        (["algorithm.kl.controller=adaptive"], "algorithm.kl: controller: adaptive 需要 place: reward"),
        (["algorithm.name=sft"], "'reward' 不能与 sft 一起使用：它不给回复打分；请去掉"),
        (["device.ranks=3", "device.mesh.context=2"], "device.ranks（3）不能被 device.mesh.replicas（1）"),
    ],
)
def test_rules_between_fields_in_chinese(overrides: list[str], words: str) -> None:
    result = isotrain("--lang", "zh", "train", "tiny-grpo", "--dry-run", *overrides)
    assert result.exit_code == 1 and words in result.output, result.output


def test_files_that_are_no_recipes_in_chinese(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- a\n", encoding="utf-8")
    missing = tmp_path / "missing.yaml"
    for given, words in (
        ("tiny-grp", "错误：tiny-grp: 没有这个文件，并且 isotrain 没有自带名为 'tiny-grp' 的 recipe"),
        (str(missing), f"错误：{missing}: 没有这个文件；`isotrain recipes` 列出可以作为起点的 recipe"),
        (str(tmp_path / "list.yaml"), "文件是一个列表；recipe 由 'key: value' 的行组成"),
    ):
        assert words in isotrain("--lang", "zh", "train", given, "--dry-run").output


def test_tracebacks_and_resolved_recipes_stay_english(tmp_path: Path) -> None:
    result = isotrain("--lang", "zh", "train", "tiny-grpo", "rollout.n=1", ISOTRAIN_DEBUG="1")
    assert str(result.exception) == (
        "override 'rollout.n=1': rollout.n (1) is too small: grpo compares responses, set 2 or more"
    )
    one, other = (isotrain("--lang", lang, "train", "tiny-sft", "--dry-run").stdout for lang in ("en", "zh"))
    assert one == other and json.loads(one)["name"] == "tiny-sft"


def log(path: Path, shift: float = 0.0) -> str:
    """A verl console log of 30 steps."""
    lines = [
        f"(TaskRunner pid=7) step:{step} - actor/pg_loss:{0.5 / step + shift} - "
        f"critic/rewards/mean:{step / 40} - perf/throughput:{1000 * (1 + shift)}"
        for step in range(1, 31)
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_parity_in_chinese(tmp_path: Path) -> None:
    one, other = log(tmp_path / "a.log"), log(tmp_path / "b.log", 0.03)
    result = isotrain("--lang", "zh", "parity", "compare", one, other, COLUMNS="120")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[0] == "拒绝：两次训练结果不一致，计算也不同。"
    assert lines[1] == (
        "结果：不同。actor/pg_loss 平均高 0.03（95 % 区间为 +0.03 到 +0.03），超过 0.02 的容差。"
        "比较了全部 30 步。"
    )
    assert lines[2].startswith("计算：不同。actor/pg_loss 在整个训练中始终高 0.03。可能的原因：loss 本身")
    for words in (
        f"参考侧  {one} (verl console log)",
        "  未通过  actor/pg_loss：verl：loss，平均绝对误差：3，上限 2 ×0.01",
        "  通过    critic/rewards/mean：verl：奖励，平均绝对误差：0，上限 4 ×0.01",
        "吞吐，前 4 步：参考侧的 1.030 倍（倒数 0.971）",
        "  P2  不同         actor/pg_loss 在整个训练中始终高 0.03",
        "  P3  未运行       未运行",
    ):
        assert words in lines, result.output


def test_tables_are_aligned(tmp_path: Path) -> None:
    """A Chinese character takes two columns."""
    one, other = log(tmp_path / "a.log"), log(tmp_path / "b.log", 0.001)
    result = isotrain("--lang", "zh", "parity", "compare", one, other, COLUMNS="120")
    lines = result.output.splitlines()
    head = next(number for number, line in enumerate(lines) if line.split()[:2] == ["窗口", "参考侧"])
    rows = [columns_before(line, "整个训练") for line in lines[head:] if "整个训练" in line][:2]
    assert len(rows) == 2 and set(rows) == {columns_before(lines[head], "窗口")}
    first, last = lines[head + 1], lines[head + 2]
    assert (
        columns_before(first, "0.0666")
        == columns_before(last, "0.17")
        == columns_before(lines[head], "参考侧")
    )


def columns_before(line: str, word: str) -> int:
    return cell_len(line[: line.index(word)])


def test_a_report_in_chinese(tmp_path: Path) -> None:
    one, other = log(tmp_path / "a.log"), log(tmp_path / "b.log", 0.03)
    result = isotrain("--lang", "zh", "parity", "compare", one, other, "--report", str(tmp_path / "zh"))
    assert f"已写入 {tmp_path / 'zh' / 'report.html'}" in result.output.replace("\n", "")
    isotrain("parity", "compare", one, other, "--report", str(tmp_path / "en"))
    page = (tmp_path / "zh" / "report.html").read_text(encoding="utf-8")
    assert '<html lang="zh-CN">' in page and "<title>b.log 对比 a.log</title>" in page
    for words in (
        "<h2>结果：两次训练相差多少</h2>",
        ">两次训练的结果一致吗？<",
        "<td>最后 25 %</td>",
        ">未运行<",
        "<figcaption>actor/pg_loss: 曲线从第 1 步起分开</figcaption>",
    ):
        assert words in page, words
    # A program reads the file beside it.
    assert (tmp_path / "zh/verdict.json").read_text() == (tmp_path / "en/verdict.json").read_text()


def test_json_of_parity_stays_english(tmp_path: Path) -> None:
    pair = (log(tmp_path / "a.log"), log(tmp_path / "b.log", 0.03))
    outputs = [isotrain("--lang", lang, "parity", "compare", *pair, "--json").output for lang in ("en", "zh")]
    shown = json.loads(outputs[0])
    assert outputs[0] == outputs[1] and shown["words"].startswith("Reject: the runs end up apart")
    assert shown["question"] == "outcome"


def test_a_line_without_translation_is_english_as_a_whole(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--lang", "zh", "runs", str(tmp_path / "none")])
    assert done.exit_code == 1 and done.output.startswith("error: there is no directory ")
