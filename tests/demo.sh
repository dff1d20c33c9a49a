#!/usr/bin/env bash
# Three workers on one branch: one lands, one becomes a patch, one conflicts.
# A fourth one's coordinator is killed in the middle of its landing, and the run is reconciled.
# Everything happens in a directory of its own, and every claim is checked.
set -euo pipefail

root=$(mktemp -d "${TMPDIR:-/tmp}/lionwt-demo.XXXXXX")
trap 'rm -rf "$root"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
for name in "${!GIT_@}" "${!LIONAGI_@}" "${!LIONWT_@}" "${!XDG_@}"; do unset "$name"; done
mkdir "$root/home"
export HOME=$root/home LIONAGI_HOME=$root/lionagi GIT_CONFIG_NOSYSTEM=1
evidence=$LIONAGI_HOME/runs/tea/artifacts/.lionwt

bold='' dim='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'; fi

step() { printf '\n%s%s%s\n' "$bold" "$1" "$plain"; }
say() { printf '%s$ %s%s\n' "$dim" "$*" "$plain"; }
run() { # COMMAND...: show it, do it
    say "$@"
    "$@"
}
quietly() { # COMMAND...: show it, do it, leave out what it answers
    say "$@"
    "$@" >/dev/null
}
ends_with() { # CODE COMMAND...: the same, and insist on its exit code
    local wanted=$1 code=0
    shift
    run "$@" || code=$?
    [ "$code" = "$wanted" ] || fail "exit code $code instead of $wanted"
}
fail() {
    printf 'demo: not as told: %s\n' "$1" >&2
    exit 1
}
edit() { # WORKER TEXT: what an agent would do in its worktree
    say "echo '$2' >.worktrees/lionagi/tea/$1/recipe.txt"
    echo "$2" >".worktrees/lionagi/tea/$1/recipe.txt"
}

step 'A small repository; its operator is on the branch "work".'
git init -q -b main "$root/repo"
cd "$root/repo"
git config user.name 'Operator'
git config user.email operator@example.invalid
echo 'tea' >recipe.txt
git add recipe.txt
git commit -q -m 'A recipe'
git switch -q -c work
run git log --oneline --decorate

step 'Three workers get a worktree and a branch each; all start from the same commit.'
run lionwt lease tea -w milk -w lemon -w sugar --target work --policy merge_validated --owner-pid none
for worker in milk lemon sugar; do quietly lionwt start tea $worker; done

step 'They all change the same line, and none sees what the others do.'
edit milk 'tea with milk'
edit lemon 'tea with lemon'
edit sugar 'tea with sugar'
[ "$(cat recipe.txt)" = tea ] || fail 'the checkout changed'

step 'Freeze: what each worker did becomes a patch that is proven against the base.'
for worker in milk lemon sugar; do run lionwt freeze tea $worker --succeeded; done

step 'milk lands, with a merge of its own; the checkout moves along.'
run lionwt promote tea milk
[ "$(cat recipe.txt)" = 'tea with milk' ] || fail 'milk is not in the checkout'
[ "$(git rev-list --merges --count work)" = 1 ] || fail 'milk did not land with a merge'

step 'lemon is kept as a patch to review, and nothing else of it.'
run lionwt promote tea lemon --policy patch_only
grep -q '^+tea with lemon$' "$evidence/lemon/candidate.patch" || fail 'the patch of lemon is not there'

step 'sugar conflicts with milk: nothing lands, the checkout is not touched, the evidence is kept.'
before=$(git rev-parse work)
ends_with 4 lionwt promote tea sugar
[ "$(git rev-parse work)" = "$before" ] || fail 'the branch moved'
grep -q 'recipe.txt' "$evidence/sugar/conflict.json" || fail 'the conflict was not written down'

step 'A fourth worker, honey. Its coordinator is killed while it lands: the branch has moved, the checkout has not.'
quietly lionwt lease tea -w honey --owner-pid none
quietly lionwt start tea honey
say "echo 'from the garden' >.worktrees/lionagi/tea/honey/honey.txt"
echo 'from the garden' >.worktrees/lionagi/tea/honey/honey.txt
quietly lionwt freeze tea honey --succeeded
say 'lionwt promote tea honey    # and kill -9 in the middle of it'
code=0
{ LIONWT_FAULT=promote.moved:kill lionwt promote tea honey || code=$?; } 2>/dev/null
[ "$code" = 137 ] || fail "the coordinator was not killed (exit code $code)"
run git status --short --branch
run lionwt status tea

step 'reconcile finds the truth and finishes: honey has landed, once, and the checkout follows.'
run lionwt reconcile tea --takeover || code=$?
[ "$(cat honey.txt)" = 'from the garden' ] || fail 'honey is not in the checkout'
[ "$(git rev-list --merges --count work)" = 2 ] || fail 'honey did not land exactly once'

step 'What the operator sees now: two merges, a clean checkout, no worktree and no branch left over.'
run git log --graph --oneline --decorate
run git status --short --branch
run git worktree list
[ -z "$(git status --porcelain)" ] || fail 'the checkout is not clean'
[ "$(git worktree list | wc -l)" = 1 ] || fail 'a worktree was left'
[ "$(git for-each-ref refs/heads | wc -l)" = 2 ] || fail 'a branch was left'

step 'And where the evidence of all four lies, for as long as the run is kept.'
say "ls $evidence/*"
(cd "$evidence" && ls -- *)
