# bash completion for lionwt. Made by `make completions` from the command tree; changes belong into lionwt/completion.py.

_lionwt_offer() { # WORD...: those that look like names and begin with what was typed
    local word
    for word; do
        if [[ $word == "$cur"* && $word != *[!A-Za-z0-9._-]* ]]; then COMPREPLY+=("$word"); fi
    done
}

_lionwt_offer_id() {
    if [[ $1 == [A-Za-z0-9]* ]]; then _lionwt_offer "$1"; fi
}

_lionwt_runs() {
    local path
    for path in "${LIONAGI_HOME:-$HOME/.lionagi}"/runs/*/; do
        path=${path%/}
        _lionwt_offer_id "${path##*/}"
    done
    if [[ $cur == */* ]]; then
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -d -- "$cur")
    fi
}

_lionwt_workers() { # [RUN]
    local run=${1:-$LIONAGI_RUN_ID} path
    if [[ -z $run ]]; then return; fi
    if [[ $run != */* ]]; then run=${LIONAGI_HOME:-$HOME/.lionagi}/runs/$run; fi
    for path in "$run"/workspaces/*.json; do
        path=${path##*/}
        _lionwt_offer_id "${path%.json}"
    done
}

_lionwt() {
    local cur=${COMP_WORDS[COMP_CWORD]} command='' ended='' wants='' word i
    local -a places=()
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ -n $wants ]]; then
            if [[ $word != = ]]; then wants=''; fi
        elif [[ -z $ended && $word == -- ]]; then
            ended=yes
        elif [[ -z $ended && $word == -* ]]; then
            case "$command $word" in
                'lease -w' | 'lease --worker') wants='any' ;;
                'lease --target') wants='any' ;;
                'lease --session') wants='any' ;;
                'lease --repo') wants='directory' ;;
                'lease --policy') wants='patch_only merge_validated' ;;
                'lease --retain-until') wants='any' ;;
                'lease --retain-for') wants='any' ;;
                'lease --require') wants='any' ;;
                'lease --check-merged') wants='any' ;;
                'lease --check-timeout') wants='any' ;;
                'lease --after') wants='worker' ;;
                'lease --owner-pid') wants='any' ;;
                'start --grants') wants='file' ;;
                'freeze --validation') wants='any' ;;
                'freeze --check') wants='any' ;;
                'freeze --check-timeout') wants='any' ;;
                'freeze --stop-after') wants='any' ;;
                'promote --policy') wants='patch_only merge_validated' ;;
                'promote --lock-timeout') wants='any' ;;
                'li --target') wants='any' ;;
                'li --policy') wants='patch_only merge_validated' ;;
                'li --retain-for') wants='any' ;;
                'li --check') wants='any' ;;
                'li --check-merged') wants='any' ;;
                'li --check-timeout') wants='any' ;;
                'li --stop-after') wants='any' ;;
            esac
        elif [[ -z $command ]]; then
            command=$word
        else
            places+=("$word")
        fi
    done
    if [[ $cur == = ]]; then cur=''; fi
    case $wants in
        '') ;;
        any) return ;;
        worker) _lionwt_workers "${places[0]}"; return ;;
        file | directory)
            compopt -o filenames
            mapfile -t COMPREPLY < <(compgen -"${wants:0:1}" -- "$cur")
            return
            ;;
        *) _lionwt_offer $wants; return ;;
    esac
    if [[ -z $ended && $cur == -* ]]; then
        case $command in
            '') _lionwt_offer -V --version --json -h --help ;;
            'lease') _lionwt_offer -w --worker --target --session --repo --policy --retain-until --retain-for --require --check-merged --check-timeout --after --owner-pid --json -h --help ;;
            'start') _lionwt_offer --grants --json -h --help ;;
            'freeze') _lionwt_offer --succeeded --failed --cancelled --validation --check --check-timeout --stop-after --accept-incomplete --json -h --help ;;
            'promote') _lionwt_offer --policy --lock-timeout --json -h --help ;;
            'reconcile') _lionwt_offer --takeover --dry-run --json -h --help ;;
            'reap') _lionwt_offer --all --dry-run --json -h --help ;;
            'status') _lionwt_offer --json -h --help ;;
            'li') _lionwt_offer --target --policy --retain-for --check --check-merged --check-timeout --stop-after --json -h --help ;;
        esac
        return
    fi
    case "$command ${#places[@]}" in
        ' 0') _lionwt_offer lease start freeze promote reconcile reap status li ;;
        'lease '0) _lionwt_runs ;;
        'start '0) _lionwt_workers; _lionwt_runs ;;
        'start '1) _lionwt_workers "${places[0]}" ;;
        'freeze '0) _lionwt_workers; _lionwt_runs ;;
        'freeze '1) _lionwt_workers "${places[0]}" ;;
        'promote '0) _lionwt_workers; _lionwt_runs ;;
        'promote '*) _lionwt_workers "${places[0]}" ;;
        'reconcile '0) _lionwt_runs ;;
        'status '0) _lionwt_runs ;;
    esac
}

complete -F _lionwt lionwt
