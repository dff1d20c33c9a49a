# fish completion for lionwt. Made by `make completions` from the command tree; changes belong into lionwt/completion.py.

function __lionwt_words # the sub-command and its arguments that stand before the cursor
    set -l wants no
    set -l ended no
    for word in (commandline -opc)[2..-1]
        if test $wants = yes
            set wants no
        else if test $ended = yes
            echo -- $word
        else if test "$word" = --
            set ended yes
        else if contains -- "$word" --after --check --check-merged --check-timeout --grants --lock-timeout --owner-pid --policy --repo --require --retain-for --retain-until --session --stop-after --target --validation --worker -w
            set wants yes
        else if not string match -q -- '-*' "$word"
            echo -- $word
        end
    end
end

function __lionwt_bare # no sub-command yet
    test (count (__lionwt_words)) -eq 0
end

function __lionwt_in # COMMAND [FROM [TO]]: in it, with so many arguments before the cursor
    set -l words (__lionwt_words)
    test (count $words) -ge 1; and test $words[1] = $argv[1]; or return 1
    set -l place (math (count $words) - 1)
    set -q argv[2]; or return 0
    test $place -ge $argv[2]; or return 1
    not set -q argv[3]; or test $place -le $argv[3]
end

function __lionwt_home
    if test -n "$LIONAGI_HOME"
        echo -- $LIONAGI_HOME
    else
        echo -- $HOME/.lionagi
    end
end

function __lionwt_runs
    for path in (__lionwt_home)/runs/*/
        string match -r -- '(?<=/)[A-Za-z0-9][A-Za-z0-9._-]*(?=/$)' $path
    end
end

function __lionwt_workers
    set -l run (__lionwt_words)[2]
    test -n "$run"; or set run $LIONAGI_RUN_ID
    test -n "$run"; or return
    string match -q -- '*/*' $run; or set run (__lionwt_home)/runs/$run
    for path in $run/workspaces/*.json
        string match -r -- '(?<=/)[A-Za-z0-9][A-Za-z0-9._-]*(?=[.]json$)' $path
    end
end

complete -c lionwt -f
complete -c lionwt -n __lionwt_bare -s V -l version -d 'Show the version and exit'
complete -c lionwt -n __lionwt_bare -l json -d 'Print exactly one JSON object on stdout'
complete -c lionwt -n __lionwt_bare -s h -l help -d 'Show this message and exit'
complete -c lionwt -n '__lionwt_in lease' -s w -l worker -x -d 'A worker id; repeatable'
complete -c lionwt -n '__lionwt_in lease' -l target -x -d 'The run\'s own working branch (first call)'
complete -c lionwt -n '__lionwt_in lease' -l session -x -d 'Session id; default $LIONAGI_SESSION_ID, else the run id'
complete -c lionwt -n '__lionwt_in lease' -l repo -x -a '(__fish_complete_directories)' -d 'A checkout of the repository; default the current directory'
complete -c lionwt -n '__lionwt_in lease' -l policy -x -a 'patch_only merge_validated' -d 'Keep a patch (default), or land it'
complete -c lionwt -n '__lionwt_in lease' -l retain-until -x -d 'Keep worktrees that need a person until then: Unix seconds or ISO 8601'
complete -c lionwt -n '__lionwt_in lease' -l retain-for -x -d 'The same, as a duration: 90s, 15m, 2h'
complete -c lionwt -n '__lionwt_in lease' -l require -x -d 'A validation every worker must pass; repeatable'
complete -c lionwt -n '__lionwt_in lease' -l check-merged -x -d 'NAME=CMD, run on each merged tree before it lands; repeatable'
complete -c lionwt -n '__lionwt_in lease' -l check-timeout -x -d 'How long one check may take'
complete -c lionwt -n '__lionwt_in lease' -l after -x -a '(__lionwt_workers)' -d 'A worker to land before these; repeatable'
complete -c lionwt -n '__lionwt_in lease' -l owner-pid -x -d 'The process that answers for the leases, or none; default the caller'
complete -c lionwt -n '__lionwt_in lease' -l json -d 'Print exactly one JSON object on stdout'
complete -c lionwt -n '__lionwt_in lease' -s h -l help -d 'Show this message and exit'
complete -c lionwt -n '__lionwt_in start' -l grants -r -F -d 'The installed path binding as a JSON file, or - for stdin'
complete -c lionwt -n '__lionwt_in start' -l json -d 'Print exactly one JSON object on stdout'
complete -c lionwt -n '__lionwt_in start' -s h -l help -d 'Show this message and exit'
complete -c lionwt -n '__lionwt_in freeze' -l succeeded -d 'The worker did its job'
complete -c lionwt -n '__lionwt_in freeze' -l failed -d 'The worker failed'
complete -c lionwt -n '__lionwt_in freeze' -l cancelled -d 'The worker was cancelled'
complete -c lionwt -n '__lionwt_in freeze' -l validation -x -d 'NAME=pass|fail[,exit=N][,evidence=REF]; repeatable'
complete -c lionwt -n '__lionwt_in freeze' -l check -x -d 'NAME=CMD, run in the worktree; a validation of that name. Repeatable'
complete -c lionwt -n '__lionwt_in freeze' -l check-timeout -x -d 'How long one check may take'
complete -c lionwt -n '__lionwt_in freeze' -l stop-after -x -d 'Seconds the worker\'s processes get to stop; 0 stops nothing and answers busy'
complete -c lionwt -n '__lionwt_in freeze' -l accept-incomplete -d 'With --failed or --cancelled: keep raw what git cannot hold'
complete -c lionwt -n '__lionwt_in freeze' -l json -d 'Print exactly one JSON object on stdout'
complete -c lionwt -n '__lionwt_in freeze' -s h -l help -d 'Show this message and exit'
complete -c lionwt -n '__lionwt_in promote' -l policy -x -a 'patch_only merge_validated' -d 'The run\'s, or patch_only to only keep patches'
complete -c lionwt -n '__lionwt_in promote' -l lock-timeout -x -d 'Seconds to wait for a lock'
complete -c lionwt -n '__lionwt_in promote' -l json -d 'Print exactly one JSON object on stdout'
complete -c lionwt -n '__lionwt_in promote' -s h -l help -d 'Show this message and exit'
complete -c lionwt -n '__lionwt_in reconcile' -l takeover -d 'Also while the owner lives; the workers\' processes are stopped'
complete -c lionwt -n '__lionwt_in reconcile' -l dry-run -d 'Only say what would be done, and why'
complete -c lionwt -n '__lionwt_in reconcile' -l json -d 'Print exactly one JSON object on stdout'
complete -c lionwt -n '__lionwt_in reconcile' -s h -l help -d 'Show this message and exit'
complete -c lionwt -n '__lionwt_in reap' -l all -d 'Every run of this machine'
complete -c lionwt -n '__lionwt_in reap' -l dry-run -d 'Only say what would be done, and why'
complete -c lionwt -n '__lionwt_in reap' -l json -d 'Print exactly one JSON object on stdout'
complete -c lionwt -n '__lionwt_in reap' -s h -l help -d 'Show this message and exit'
complete -c lionwt -n '__lionwt_in status' -l json -d 'Print exactly one JSON object on stdout'
complete -c lionwt -n '__lionwt_in status' -s h -l help -d 'Show this message and exit'
complete -c lionwt -n '__lionwt_in li' -l target -x -d 'The run\'s own working branch; default the one checked out'
complete -c lionwt -n '__lionwt_in li' -l policy -x -a 'patch_only merge_validated' -d 'Keep patches (default), or land them'
complete -c lionwt -n '__lionwt_in li' -l retain-for -x -d 'Keep worktrees that need a person for so long: 90s, 15m, 2h'
complete -c lionwt -n '__lionwt_in li' -l check -x -d 'NAME=CMD, run in each worktree when its worker is done. Repeatable'
complete -c lionwt -n '__lionwt_in li' -l check-merged -x -d 'NAME=CMD, run on each merged tree before it lands; repeatable'
complete -c lionwt -n '__lionwt_in li' -l check-timeout -x -d 'How long one check may take; 15m if nothing is said'
complete -c lionwt -n '__lionwt_in li' -l stop-after -x -d 'Seconds that what a worker left running gets to stop; 10'
complete -c lionwt -n '__lionwt_in li' -l json -d 'A refusal of lionwt\'s as one JSON object on stdout'
complete -c lionwt -n '__lionwt_in li' -s h -l help -d 'Show this message and exit'
complete -c lionwt -n __lionwt_bare -a lease -d 'Give workers a worktree each, all of them or none'
complete -c lionwt -n __lionwt_bare -a start -d 'Say that a worker has its paths and runs'
complete -c lionwt -n __lionwt_bare -a freeze -d 'Stop a worker, and turn what it did into proven evidence'
complete -c lionwt -n __lionwt_bare -a promote -d 'Keep the patches of frozen workers, or land them, in dependency order'
complete -c lionwt -n __lionwt_bare -a reconcile -d 'After a crash: find the truth about every lease of a run, and finish'
complete -c lionwt -n __lionwt_bare -a reap -d 'Tear down retained worktrees whose time has come, empty the trash, list orphans'
complete -c lionwt -n __lionwt_bare -a status -d 'Show every lease of a run (or of all runs): its state, what blocks it, what to type next'
complete -c lionwt -n __lionwt_bare -a li -d 'Run lionagi\'s li with every worker in a lease'
complete -c lionwt -n '__lionwt_in lease 0 0' -a '(__lionwt_runs)' -d run
complete -c lionwt -n '__lionwt_in start 0 0' -a '(__lionwt_runs)' -d run
complete -c lionwt -n '__lionwt_in start 0 0' -a '(__lionwt_workers)' -d worker
complete -c lionwt -n '__lionwt_in start 1 1' -a '(__lionwt_workers)' -d worker
complete -c lionwt -n '__lionwt_in freeze 0 0' -a '(__lionwt_runs)' -d run
complete -c lionwt -n '__lionwt_in freeze 0 0' -a '(__lionwt_workers)' -d worker
complete -c lionwt -n '__lionwt_in freeze 1 1' -a '(__lionwt_workers)' -d worker
complete -c lionwt -n '__lionwt_in promote 0 0' -a '(__lionwt_runs)' -d run
complete -c lionwt -n '__lionwt_in promote 0 0' -a '(__lionwt_workers)' -d worker
complete -c lionwt -n '__lionwt_in promote 1' -a '(__lionwt_workers)' -d worker
complete -c lionwt -n '__lionwt_in reconcile 0 0' -a '(__lionwt_runs)' -d run
complete -c lionwt -n '__lionwt_in status 0 0' -a '(__lionwt_runs)' -d run
