"""Scripts are expanded as bash would, as far as their text tells, and never run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from isotrain.tools.imports.shell import read_script
from isotrain.tools.imports.source import ImportSourceError, Unknown

pytest.importorskip("tree_sitter_bash")

# Each prints its words one per line when bash runs it, and is read to the same words here.
SAME_AS_BASH = {
    "variables": 'a=1; b="x y"; run $a "$b" $b ${a}z "${b}z"',
    "quotes": """run 'a b' "c d" e\\ f 'it'"'"'s' "q\\"q" "\\$a" '$a'""",
    "arrays": 'x=(a "b c"); x+=(d); run "${x[@]}" end',
    "list in a list": 'x=(a); y=("${x[@]}" b); run "${y[@]}"',
    "defaults": 'run ${x:-d} "${y:-e f}" ${z:=g} ${z}',
    "set and empty": 'x=""; y=v; run a${x:+no}b ${y:+yes} "${x:-d}" ${x-e}e',
    "arithmetic": "n=3; run $((n * 4 + 2)) $(((n + 1) / 2)) $((2 * -n)) $((7 % n)) $((-7 / 2)) $((n*(n-1)))",
    "arithmetic with braces": "n=3; m=4; run $(( ${n} * $m ))",
    "arithmetic in a default": "run ${x:-$((2 * 3))} a${y:-$((1 + 1))}b",
    "continued lines": "run a \\\n  b=c\\\n  d",
    "append text": "x=a; x+=b; run $x",
    "case": 'k=b; case "$k" in a) v=1 ;; b|c) v=2 ;; *) v=3 ;; esac; run $v',
    "case by pattern": "k=vllm-x; case $k in vllm*) v=1 ;; *) v=2 ;; esac; run $v",
    "if": 'n=3; if [ $n -gt 2 ]; then v=big; else v=small; fi; if [ "$v" = small ]; then v=no; fi; run $v',
    "elif": "n=2; if [ $n -eq 1 ]; then v=a; elif [ $n -eq 2 ]; then v=b; else v=c; fi; run $v",
    "double brackets": 'x=abc; if [[ $x == a* ]]; then run yes; fi',
    "empty test": 'x=""; if [ -z "$x" ]; then run empty; fi',
    "function": 'f() { run "$1" "$2" "$@"; }; f a "b c"',
    "export": "export A=1 B=2; run $A$B",
    "environment before a command": "A=1 run a",
    "and": '[ 1 -eq 1 ] && run yes\n[ 1 -eq 2 ] && run no',
    "text in a variable": "read -r -d '' w <<EOF || true\na \\\n --b c\n $((1 + 1)) d=e\nEOF\nrun $w",
    "comments": "# run no\nrun yes # run no",
    "for": 'for i in a "b c" {1..3}; do x+=("$i"); done; run "${x[@]}"',
    "items and slices": 'x=(a "b c" d e); run "${x[1]}" "${x[@]:1}" "${x[@]:1:2}" ${#x[@]} "${x[-1]}" "$x"',
    "ends and cases": 'x=a/b.c.d; run ${x##*/} ${x%.*} ${x%%.*} ${x#*/} ${#x} ${x:2:3} ${x^^} "${x,,}"',
    "a list inside text": 'x=(a b c); y=(); run "p=${x[@]}q" "p=${x[*]}" p=${x[*]} "e${y[@]}f" "${y[@]}"',
    "unquoted text is split": 'x="1 2"; y=" "; run a=$x a="$x" a${y}b "" $y',
    "arguments": 'set -- a "b c" d; shift; run $# "$1" "$@"',
    "local": 'x=1; f() { local x=2; y=$x; }; f; run $x $y',
    "unset": 'x=1; unset x; run ${x:-gone}',
    "subshell": 'x=1; (x=2; run $x); echo 3 | read x; { x+=4; }; run $x',
    "exit": 'run a; exit 0; run b',
    "exit on a condition": '[ 1 -eq 2 ] || exit 0; run b',
    "return": 'f() { run a; return; run b; }; f; run c',
    "eval": "x='y=2'; eval \"$x\"; run $y",
    "or": 'x=""; [ -n "$x" ] || x=d; run $x; false || run e; true || run f',
    "longer tests": 'x=a; if [ $x = a ] && { [ 1 = 2 ] || ! false; }; then run yes; fi',
    "double brackets and more": 'x=a; [[ $x == a && ! $x == b ]] && run yes; [[ $x == "a*" ]] || run no',
    "arithmetic tests": 'n=3; if (( n % 2 == 1 && n > 2 )); then run odd; fi; (( n > 5 )) || run small',
    "lists of tests": 'x=(a); [[ 1 == 1 ]] && x+=(b); [[ 1 == 2 ]] && x+=(c); run "${x[@]}"',
    "quoted parts": """a='k=v w'; run +"$a" k='["a","b"]' 'k={a: 1, b: 2}' ++k="a b" $'t\\tu'""",
    "escapes": r"""run $'a\x41b' $'\101' $'\u00e9' $'\e' $'\cA' $'a\'b' $'\?' $'\z' $'a\\b'""",
    "a line goes on in quotes": 'run "a\\\nb" \'c\\\nd\' e',
    "first item of a list": 'x=(a b); x=c; run "${x[@]}"; x+=d; run "${x[@]}"',
    "octal and hexadecimal": "x=010; run $((x + 1)) $((010)) $((0x1f)); "
    "[[ 010 -eq 8 ]] && run yes; [ 010 -eq 10 ] && run no",
    "words behind a redirection": "run 2>/dev/null a b; run c >f d 2>&1 e; run g <<< x h; >f run i j",
    "words behind a here-document": "run a <<EOF b\nx\nEOF\nrun c",
    "a command behind a here-document": "cat <<EOF && run a\nx\nEOF\ncat <<EOF | run b\ny\nEOF",
    "quotes of a default": r'''run "${x:-a b}" ${x:-a b} ${x:-"a b"} '''
    r'''"${x:-"a b"}" ${x:-'a b'} ${x:-a\ b} "${x:-'a b'}"''',
    "quotes of an alternative": 'y=v; run ${y:+"a b" c} "${y:+a b}" ${y:+a b} ${x:+no} "${x:+}"',
    "a list if it is set": 'x=(1 "2 3"); y=(); run "${x[@]+"${x[@]}"}" ${y[@]+"${y[@]}"} '
    '"${y[@]+no}" "${y[@]:-d}" ${y+no}',
    "an item if it is set": "y=(a); run ${y[1]-no} ${y[1]+wrong} ${y[0]+yes}; y=(); run a ${y[0]+no}",
    "tests by the number of words": '[ a = a -a b = b ] && run 1; [ a = b -o c = c ] && run 2; '
    'x=; [ -n $x ] && run 3',
    "tests of signs": '[ ! a = a -a b = b ] || run 1; [ = = = ] && run 2; [ ! "" ] && run 4; [ -z ] && run 5',
    "read takes backslashes": "read -d '' w <<EOF\na\\tb \\\nc\nEOF\nrun $w",
    "read strips tabs": "read -r -d '' w <<-EOF\n\ta\n\tb\n\tEOF\nrun \"$w\"",
    "quoted patterns": 'x="a*"; [[ abc == $x ]] && run 1; [[ abc == "$x" ]] || run 2; '
    '[[ ab == a\\* ]] || run 3; [[ abc == ab"c" ]] && run 4',
    "patterns of case": 'p="a*"; case abc in $p) run 1 ;; esac; '
    'case abc in "$p") run 2 ;; *) run 3 ;; esac; case [a] in \\[a\\]) run 4 ;; esac',
    "negated classes": 'case b in [^a]) run 1 ;; esac; case b in [!a]) run 2 ;; esac',
    "prefixes": 'f() { run "$@"; }; time f a; command run2 2>/dev/null; builtin eval "x=1"; run b $x',
    "in the background": 'x=1; x=2 & wait; run $x; f() { x=3; }; f & wait; run $x; run c 2>&1',
    "a function that is unset": 'run2() { run no; }; unset -f run2; run2 2>/dev/null; run yes',
    "return outside a function": "return 2>/dev/null; run a",
    "comments in lists": 'x=( # no\n a # b c\n # d\n "e # f"\n g\\#h\n # it is "open\n i#j\n); run "${x[@]}"',
    "a comment ends a continued command": "run a \\\n  # b=c \\\n  : d\nrun e",
    "patterns without files": "run k=a* k=? 'a*' \"b?\" c\\*",
    "empty words": "x=; y=(); run '' \"\" \"$x\" $x a=\"$x\" \"${y[@]}\" \"${y[*]}\"",
    "lists of Hydra": """run a=['c','d'] 'b=["e"]' c="['f']" d=[g,h]""",
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_AS_BASH)
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash to compare with")
    script = SAME_AS_BASH[name]
    preamble = 'exec 3>&1 >/dev/null\nrun() { [ $# = 0 ] || printf "%s\\0" "$@" >&3; }\n'
    command = [bash, "--norc", "-c", preamble + script]
    expected = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=30,
        cwd=tmp_path,
        env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
    ).stdout
    found = [
        word
        for command in read_script(script).commands
        if command.words[0] in ("run", "time")
        for word in command.words[1:]
    ]
    assert found == expected.split("\0")[:-1]


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("x=1\nrun a\\\nb", 2),  # bash reads the one word ab
        ("x=1\nrun a \\ \n b", 2),  # a word of one blank, and the end of the command
        ("run a=1 \\\t\n b=2", 1),
        ("run (a)", 1),
        ("run a;;", 1),
        ("run a\nrun 'b", 2),
        ("shopt -s expand_aliases\nalias python3='python3 -m verl.trainer.main_ppo'", 1),
        ("if true; then run a; fi | cat > f g", 1),
        ("x=1\neval 'run (a)'", 2),
    ],
)
def test_text_that_is_read_otherwise_than_by_bash_is_named_by_line(script: str, line: int) -> None:
    assert line in read_script(script).broken_lines


def test_blank_lines_and_a_last_backslash_change_nothing() -> None:
    shell = read_script("\n\n  \nx=1\nx=2 & wait\nrun a $x \\\n")
    assert shell.broken_lines == [] and shell.commands[-1].words == ("run", "a", "1")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("run a=$(hostname)", "line 1 runs a command for it: $(hostname)"),
        ("run a=`date`", "line 1 runs a command for it"),
        ("\nrun a=$1", "line 2 takes it from the command line ($1)"),
        ("run a=$WORLD_SIZE", "line 1 takes it from the environment ($WORLD_SIZE)"),
        ("run a=$((b * 2))", "takes it from the environment ($b)"),
        ("run a=$((2 ** 70))", "is not read"),
        ("run a=$((1 / 0))", "divides by zero"),
        (
            'a=1\nif [ "$HOST" = x ]; then a=2; fi\nrun a=$a',
            'a is 2 if [ "$HOST" = x ] (line 2), 1 otherwise (line 2) (--set HOST=VALUE gives it)',
        ),
        ("for a in $LIST; do run a=$a; done", "it changes in the loop of line 1"),
        ("while read -r a; do run a=$a; done", "it changes in the loop of line 1"),
        ("for ((i = 0; i < 3; i++)); do a=$i; done; run a=$a", "it changes in the loop of line 1"),
        ("x=abc; run a=${x/b/d}", "line 1 computes it: ${x/b/d}"),
        ("x=(a $N); run a=${x[1]}", "line 1 takes it from a list"),
        ("declare -A x; run a=${x[k]}", "takes it from a list"),
        ("x=1; let x=2; run a=$x", "sets it with let"),
        ("x=1; ((x += 1)); run a=$x", "computes it: ((x += 1))"),
        ("x=1; source ./other.sh; run a=$x", "line 1 sources ./other.sh, which may set it"),
        ("source ./other.sh; run a=${x:-1}", "line 1 sources ./other.sh, which may set it"),
        ('x=1; eval "$CODE"; run a=$x', "line 1 runs text as a program"),
        ("mapfile -t x < f; run a=$x", "sets it with mapfile"),
        ("read -r x <<< 1; run a=$x", "sets it with read"),
        ("printf -v x %d 3; run a=$x", "sets it with printf"),
        ("x=1; x[0]=2; run a=$x", "sets a part of it"),
        ("readonly x=1; x=2; run a=$x", "it is set although it is readonly"),
        ("x=08; run a=$((x + 1))", "'08' is no number"),
        ("run a=$'\\xff'", "has bytes that are no text"),
        ("IFS=,; x=1,2; run a=$x", "IFS is set"),
        ('f() { [ "$N" = 1 ] && return; x=2; }; x=1; f; run a=$x', 'if [ "$N" = 1 ]'),
        ("x=1; nvidia-smi && x=2; run a=$x", "x is 2 if nvidia-smi (line 1), 1 unless nvidia-smi (line 1)"),
        ('x=1; if [ "$N" = 1 ]; then x=2; elif [ "$N" = 2 ]; then x=3; fi; run a=$x', "1 otherwise (line 1)"),
    ],
)
def test_what_the_text_does_not_tell_is_unknown(script: str, why: str) -> None:
    word = next(c.words[1] for c in read_script(script).commands if c.words[0] == "run")
    assert isinstance(word, Unknown)
    assert why in word.why
    assert word.text == "a=?"


def test_files_that_match_a_pattern_are_unknown() -> None:
    for script in ("run data/*.jsonl", "x='?'; run $x", "shopt -s nullglob; run a=*", "x=(*); run ${x[@]}"):
        word = next(command.words[1] for command in read_script(script).commands if command.words[0] == "run")
        assert isinstance(word, Unknown) and "takes the files that match it" in word.why


def test_only_the_word_with_the_gap_is_unknown() -> None:
    [read, run] = read_script("read -r -d '' w <<EOF\na $1 b\nEOF\nrun $w").commands
    assert read.words[0] == "read"
    assert run.words[1] == "a" and isinstance(run.words[2], Unknown) and run.words[3] == "b"


def test_arguments_of_the_script_are_left_out() -> None:
    [command] = read_script('run a "$@" b $@').commands
    assert command.words == ("run", "a", "b")


def test_directories_stay_relative_to_where_the_script_runs() -> None:
    [command] = read_script('run "$HOME/data" ~/x $PWD/y $(pwd)/z').commands
    assert command.words == ("run", "~/data", "~/x", "./y", "./z")


def test_secrets_of_variables_are_not_kept() -> None:
    script = (
        "export WANDB_API_KEY=0123456789abcdef01234567\nPASSWORD=hunter\nINPUT_KEY=prompt\nMAX_TOKEN=12\n"
    )
    [command] = read_script(script + "run $WANDB_API_KEY $PASSWORD $INPUT_KEY $MAX_TOKEN").commands
    assert command.words == ("run", "***", "***", "prompt", "12")


def test_a_sourced_file_is_not_read_but_told() -> None:
    shell = read_script("source ./secrets.sh\nrun a")
    assert shell.notes == ["line 1: ./secrets.sh is sourced; it was not read"]


@pytest.mark.parametrize(
    "script",
    [
        "x=" + "$((" * 500 + "1" + "))" * 500,
        "a" + "{" * 5000,
        "if true; then " * 300 + "run a" + "; fi" * 300,
        "x=aaaaaaaaaa\n" + "x=$x$x$x$x$x$x$x$x$x$x\n" * 12 + "run $x",
        "f() { g; g; }; g() { f; f; }; f",
        "x=(a a a a a a a a a a)\n" + 'x=("${x[@]}" "${x[@]}" "${x[@]}" "${x[@]}")\n' * 30 + 'run "${x[@]}"',
    ],
)
def test_bombs_end_soon(script: str) -> None:
    """In an answer or in an error, but neither in a traceback nor without end."""
    try:
        read_script(script)
    except ImportSourceError as error:
        assert "longer" in str(error) or "nested" in str(error) or "too" in str(error)
