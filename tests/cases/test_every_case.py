"""Every failure that was reported of tools like this one, and the tests that show what lionwt does instead."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

#: The failure → the tests that drive lionwt through it, each as ``module::function`` without ``test_``.
CASES: dict[str, str] = {
    # What a worker leaves behind.
    "ignored-files-destroyed": """
        cases/capture_cases::however_a_worker_ends_nothing_that_it_made_is_lost
        capture::ignored_files_are_named_and_the_small_ones_kept_with_bytes_and_mode
        teardown::an_ignored_file_that_changed_after_the_freeze_is_saved_again
        cases/submodule_cases::ignored_and_special_files_of_a_submodule_are_named_and_the_small_ones_kept""",
    "committed-work-lost-with-branch": """
        cases/capture_cases::however_a_worker_ends_nothing_that_it_made_is_lost
        misbehaviour::commits_that_only_a_reflog_remembers_are_in_the_bundle
        cases/submodule_cases::commits_in_a_submodule_of_a_submodule_outlive_the_worktree
        teardown::commits_made_after_the_freeze_are_bundled""",
    "untracked-hidden-from-status": """
        cases/capture_cases::however_a_worker_ends_nothing_that_it_made_is_lost
        cases/capture_cases::no_setting_for_the_eyes_reaches_patch_or_capture""",
    "detached-commit-unreferenced": """
        cases/capture_cases::however_a_worker_ends_nothing_that_it_made_is_lost
        misbehaviour::whatever_the_worker_did_to_its_history_its_tree_is_what_lands
        misbehaviour::commits_that_only_a_reflog_remembers_are_in_the_bundle
        reconcile::commits_that_only_head_remembers_are_saved_where_the_worktree_was_deleted""",
    "baseline-reread-on-resume": """
        cases/capture_cases::the_base_of_a_lease_is_the_one_it_was_leased_with_however_often_it_is_resumed""",
    "stash-shared-between-worktrees": """
        cases/capture_cases::stash_entries_that_came_since_the_lease_are_named_with_whose_they_are
        misbehaviour::a_stash_of_the_worker_is_named_and_left_alone
        misbehaviour::no_stash_of_somebody_else_is_blamed_on_the_worker""",
    "embedded-repo-becomes-gitlink": """
        cases/capture_cases::anything_that_git_could_take_for_a_repository_is_captured_or_refused_by_name
        cases/capture_cases::a_bare_repository_inside_is_files_like_any_other
        capture::a_repository_inside_refuses_the_freeze_and_its_files_are_kept_when_given_up
        capture::a_repository_that_was_added_as_a_gitlink_is_refused_as_well
        misbehaviour::a_worktree_inside_the_worktree_is_a_repository_inside""",
    "submodule-blocks-remove": """
        teardown::a_worktree_with_a_submodule_is_removed
        cases/submodule_cases::uncommitted_work_in_a_submodule_of_a_submodule_refuses_the_freeze
        cases/submodule_cases::a_submodule_whose_checkout_was_taken_away_still_gives_up_its_commits""",
    "worktree-replaced-by-symlink": """
        misbehaviour::a_worktree_that_is_not_the_leased_directory_is_never_followed
        misbehaviour::a_frozen_worktree_that_became_a_link_is_left_and_what_it_leads_to_is_untouched
        start::a_worktree_that_is_not_the_leased_directory_is_refused
        teardown::a_symlink_in_the_worktree_s_place_is_never_followed""",
    "symlinked-deps-followed": """
        cases/capture_cases::directories_shared_by_links_survive_the_worktree_that_linked_them
        teardown::a_link_in_the_trash_s_place_is_never_followed""",
    # Capture.
    "skip-worktree-edit-invisible": """
        cases/capture_cases::whatever_state_its_index_is_in_the_capture_is_the_disk_and_the_index_stays
        capture::what_the_index_of_the_worker_hides_or_half_knows_is_captured_as_it_lies_on_disk""",
    "worker-commits-hide-from-diff-HEAD": """
        misbehaviour::whatever_the_worker_did_to_its_history_its_tree_is_what_lands
        cases/capture_cases::the_base_of_a_lease_is_the_one_it_was_leased_with_however_often_it_is_resumed""",
    "moving-base-shows-reversals": """
        cases/capture_cases::the_patch_is_against_the_base_wherever_the_target_has_gone
        lease::every_worker_starts_from_the_one_base_while_the_target_moves""",
    "untracked-missing-from-diff": """
        capture::every_kind_of_file_comes_back_from_the_patch_byte_for_byte
        cases/capture_cases::however_a_worker_ends_nothing_that_it_made_is_lost""",
    "capture-mutates-index": """
        cases/capture_cases::whatever_state_its_index_is_in_the_capture_is_the_disk_and_the_index_stays
        capture::every_kind_of_file_comes_back_from_the_patch_byte_for_byte""",
    "binary-needs-binary-flag": """
        capture::every_kind_of_file_comes_back_from_the_patch_byte_for_byte
        cases/capture_cases::no_attribute_that_is_for_showing_changes_the_patch""",
    "user-diff-config-breaks-patch": """
        cases/capture_cases::no_setting_for_the_eyes_reaches_patch_or_capture
        cases/capture_cases::no_attribute_that_is_for_showing_changes_the_patch
        capture::the_operators_own_diff_settings_do_not_reach_the_patch""",
    "text-decoding-corrupts-patch": """
        cases/capture_cases::content_of_any_kind_comes_back_byte_for_byte""",
    "strip-corrupts-patch": """
        cases/capture_cases::content_of_any_kind_comes_back_byte_for_byte""",
    "exec-bit-lost-filemode-false": """
        cases/capture_cases::no_setting_for_the_eyes_reaches_patch_or_capture
        security::an_attack_neither_runs_nor_leads_astray_nor_hides_work""",
    "symlink-typechange": """
        cases/capture_cases::every_change_of_kind_of_an_entry_is_named_and_lands
        capture::a_symlink_out_of_the_worktree_is_kept_as_a_link_and_named""",
    "one-bad-path-fails-whole-add": """
        capture::a_submodule_with_a_dangling_git_file_refuses_the_freeze
        capture::a_name_that_git_refuses_is_never_dropped_in_silence
        capture::an_unreadable_path_refuses_the_freeze_until_it_is_mended_or_given_up
        misbehaviour::a_torn_index_is_refused_until_it_is_mended_or_given_up""",
    "truncated-patch-looks-valid": """
        cases/capture_cases::a_patch_that_a_limit_cuts_short_is_no_candidate
        capture::many_files_and_a_large_one_are_captured_whole
        promote::evidence_that_is_not_what_was_frozen_is_never_landed
        freeze::a_patch_that_changes_while_it_is_recorded_is_no_candidate""",
    "quoted-paths": """
        capture::every_kind_of_file_comes_back_from_the_patch_byte_for_byte
        cases/state_cases::names_that_are_no_text_go_through_records_and_answers""",
    "empty-vs-missing-patch": """
        cases/capture_cases::a_patch_and_no_patch_are_never_taken_for_each_other
        promote::an_empty_patch_is_discarded_without_a_commit""",
    "crlf-only-edit-vanishes": """
        capture::a_line_ending_edit_that_git_normalises_is_in_the_manifest_and_kept_raw
        filters::line_endings_follow_the_attributes_in_every_worktree
        filters::autocrlf_input_of_the_repository_itself_counts""",
    "required-filter-missing": """
        filters::a_required_filter_whose_program_is_missing_refuses_the_lease_and_leaves_nothing
        filters::a_filter_that_fails_half_way_at_freeze_leaves_the_lease_running""",
    "lossy-clean-filter": """
        capture::what_the_operators_lossy_filter_and_ident_take_away_is_kept_raw""",
    "special-files-not-captured": """
        capture::fifos_sockets_and_empty_directories_are_named
        cases/submodule_cases::ignored_and_special_files_of_a_submodule_are_named_and_the_small_ones_kept
        misbehaviour::a_fifo_that_git_itself_opens_is_named_and_not_waited_for""",
    "rename-loses-old-path-in-list": """
        cases/capture_cases::every_change_of_kind_of_an_entry_is_named_and_lands
        cases/capture_cases::no_setting_for_the_eyes_reaches_patch_or_capture""",
    "unreadable-file-empties-capture": """
        capture::an_unreadable_path_refuses_the_freeze_until_it_is_mended_or_given_up
        teardown::an_unreadable_file_that_could_not_be_saved_keeps_the_worktree""",
    "ignored-by-operator-excludes": """
        cases/capture_cases::excludes_that_are_nobodys_in_the_tree_hide_nothing_and_those_in_it_name_what_they_hide
        capture::what_only_the_operators_excludes_ignore_is_captured""",
    "stale-tree-after-failed-add": """
        cases/capture_cases::a_freeze_that_failed_before_leaves_nothing_that_a_later_one_could_take
        freeze::a_freeze_that_dies_anywhere_leaves_the_lease_running_and_can_be_repeated""",
    "artifacts-inside-worktree": """
        cases/capture_cases::no_state_of_lionwts_is_in_what_it_captures
        names::state_and_artifacts_never_lie_among_the_worktrees
        cases/state_cases::an_id_that_is_not_already_safe_is_refused_and_never_rewritten""",
    # The repository, its settings, and who calls.
    "git-init-sets-core-bare": """
        cases/capture_cases::a_shared_configuration_that_a_worker_broke_is_named_and_left
        lease::a_shared_config_that_breaks_the_checkout_is_refused_and_named""",
    "worker-config-writes-are-shared": """
        cases/repository_cases::a_worker_s_config_in_the_shared_file_is_told_and_changes_no_commit
        misbehaviour::changes_of_the_shared_configuration_and_hooks_are_diagnostics
        security::no_program_that_a_worker_configured_is_ever_executed""",
    "GIT_DIR-leak-beats-dash-C": """
        cases/repository_cases::no_variable_of_gits_reaches_a_git_that_lionwt_starts
        repositories::an_environment_that_names_another_repository_is_ignored""",
    "called-from-a-hook": """
        repositories::a_life_inside_the_hooks_of_a_commit_and_of_a_push_acts_on_the_right_repository
        lease::a_lease_called_from_a_git_hook_uses_its_own_repository""",
    "parallel-add-config-lock": """
        cases/repository_cases::leases_at_once_beside_gits_own_worktrees_all_stand
        lease::eight_calls_at_once_open_one_run_and_lease_eight_workers""",
    "parallel-add-without-tracking": """
        cases/repository_cases::leases_at_once_beside_gits_own_worktrees_all_stand
        lease::many_workers_are_leased_in_one_call_and_all_are_clean_at_once""",
    "prune-eats-half-made-worktree": """
        cases/repository_cases::a_worktree_that_is_being_made_outlives_prune_repair_and_gc""",
    "failed-add-leaves-branch-then-stale-base": """
        cases/repository_cases::a_signal_during_the_making_leaves_no_branch_for_a_retry_to_start_from
        lease::a_lease_that_fails_half_way_leaves_nothing_and_its_ids_free
        lease::an_existing_branch_path_or_record_is_refused_before_anything_is_made""",
    "ref-dir-file-conflict": """
        cases/repository_cases::a_branch_in_the_way_is_named_before_anything_is_made
        lease::a_branch_where_the_workers_branches_would_lie_is_refused""",
    "post-checkout-hook-fails": """
        cases/repository_cases::hooks_of_every_kind_are_neither_run_nor_needed
        repositories::hooks_that_fail_or_hang_are_never_run""",
    "post-checkout-hook-hangs": """
        cases/repository_cases::hooks_of_every_kind_are_neither_run_nor_needed
        repositories::hooks_that_fail_or_hang_are_never_run""",
    "ambiguous-target-name": """
        cases/landing_cases::a_target_that_has_a_tag_s_name_is_the_branch
        names::a_branch_is_meant_even_where_a_tag_or_remote_has_its_name""",
    "called-inside-linked-worktree-nests": """
        lease::a_lease_called_inside_a_linked_worktree_lies_in_the_main_worktree
        repositories::lease_called_in_a_linked_worktree_pins_that_one_and_keeps_worktrees_under_the_main_one
        cases/capture_cases::no_state_of_lionwts_is_in_what_it_captures""",
    "bare-and-submodule-layouts": """
        repositories::a_bare_repository_is_refused
        repositories::a_linked_worktree_of_a_submodule_keeps_its_worktrees_in_the_submodules_own_checkout
        repositories::two_workers_live_and_land_in_a_repository_of_any_kind""",
    "worktrees-dir-pollutes-main": """
        lease::the_operators_checkout_stays_as_it_is_apart_from_one_exclude_line
        lease::the_exclude_line_is_there_once_and_works""",
    "clean-ffdx-destroys-leases": """
        cases/repository_cases::what_the_operator_sweeps_away_is_told_as_it_is
        cases/state_cases::state_that_lies_in_a_checkout_is_warned_of_once_and_works""",
    "slug-collision": """
        cases/state_cases::ids_that_fold_to_one_name_are_refused_and_like_ones_are_kept_apart
        names::an_id_is_accepted_as_it_stands_or_refused
        names::every_accepted_pair_has_a_branch_and_a_path_of_its_own""",
    "admin-dir-name-is-not-basename": """
        cases/state_cases::ids_that_fold_to_one_name_are_refused_and_like_ones_are_kept_apart
        teardown::a_registration_is_known_by_its_nonce_and_not_by_its_name""",
    "name-too-long": """
        cases/state_cases::an_id_that_is_not_already_safe_is_refused_and_never_rewritten
        cli::the_longest_names_go_through_a_whole_life""",
    "enospc-during-allocation": """
        repositories::a_full_repository_loses_nothing_and_goes_on_after_space_is_freed
        repositories::a_full_state_file_system_loses_nothing_and_goes_on_after_space_is_freed""",
    "shallow-base-ancestry": """
        repositories::two_workers_live_and_land_in_a_repository_of_any_kind""",
    "partial-clone-offline": """
        repositories::a_partial_clone_that_lacks_blobs_and_its_remote_is_refused_and_undone
        repositories::two_workers_live_and_land_in_a_repository_of_any_kind""",
    "sparse-checkout-add-refused": """
        capture::the_operator_may_work_in_a_sparse_checkout_and_the_worker_still_has_everything
        capture::a_worktree_that_the_worker_made_sparse_deletes_nothing""",
    "private-index-in-sparse-worktree-deletes": """
        capture::a_worktree_that_the_worker_made_sparse_deletes_nothing""",
    "sha256-repo": """
        lease::a_sha256_repository_and_packed_refs_are_leased_like_any_other
        capture::deleting_everything_is_a_candidate_like_any_other""",
    "refs-not-files": """
        cases/repository_cases::a_branch_in_the_way_is_named_before_anything_is_made
        repositories::two_workers_live_and_land_in_a_repository_of_any_kind""",
    "unborn-head": """
        repositories::a_repository_without_commits_is_refused
        lease::a_repository_without_a_checkout_or_commit_is_refused""",
    "default-base-is-stale": """
        cases/repository_cases::a_worker_starts_from_the_named_target_and_nothing_else""",
    # Workers that go their own way.
    "worker-switched-branch": """
        misbehaviour::whatever_the_worker_did_to_its_history_its_tree_is_what_lands""",
    "worker-left-base-history": """
        misbehaviour::whatever_the_worker_did_to_its_history_its_tree_is_what_lands
        misbehaviour::what_is_unfinished_or_merged_in_from_elsewhere_is_kept_and_never_landed""",
    "stale-index-lock": """
        cases/repository_cases::a_lock_that_a_killed_git_left_costs_a_wait_or_an_answer_and_never_work
        misbehaviour::whatever_the_worker_did_to_its_history_its_tree_is_what_lands""",
    "writer-alive-during-freeze": """
        freeze::a_writer_without_ids_is_noticed_and_nothing_is_recorded
        freeze::what_is_written_after_the_freeze_is_saved_before_anything_is_removed
        freeze::the_workers_processes_are_asked_first_and_killed_after_the_time_they_get""",
    "cwd-removed": """
        cases/landing_cases::a_caller_that_has_lost_its_directory_can_still_land
        repositories::a_lease_from_a_directory_that_is_gone_says_so
        teardown::a_process_that_stands_in_the_worktree_keeps_it_and_is_not_killed""",
    "worker-moves-target-ref": """
        misbehaviour::a_worker_that_moves_the_target_lands_nothing
        promote::a_target_that_moved_otherwise_needs_a_person""",
    "alternate-unwritable-lock-names": """
        cases/repository_cases::another_repository_s_lock_on_a_worktree_says_nothing_about_whose_it_is
        misbehaviour::an_unlocked_registration_is_refused_and_the_way_back_is_named""",
    "two-reapers-check-then-act": """
        cases/state_cases::reapers_at_once_look_again_before_they_remove
        reconcile::reap_is_busy_while_a_process_stands_in_what_has_expired""",
    "dir-deleted-by-hand-pins-branch": """
        cases/repository_cases::what_the_operator_sweeps_away_is_told_as_it_is
        reconcile::a_worktree_deleted_by_hand_does_not_pin_its_branch_and_its_commits_are_saved
        cases/submodule_cases::submodule_commits_are_saved_where_the_worktree_was_deleted_by_hand""",
    # Landing.
    "conflict-leaves-MERGE_HEAD": """
        cases/landing_cases::no_setting_changes_what_lands_or_what_a_conflict_leaves
        promote::every_kind_of_conflict_is_evidence_and_touches_nothing""",
    "merge-exit-codes-do-not-tell": """
        cases/landing_cases::the_reason_of_a_refused_landing_is_the_one_that_holds
        checkout::a_checkout_that_is_not_ready_is_waited_for""",
    "update-ref-under-checkout": """
        cases/landing_cases::the_checkout_of_the_operator_moves_with_the_ref
        checkout::no_git_of_the_operator_comes_between_ref_and_checkout""",
    "target-in-another-worktree-false-sha": """
        cases/landing_cases::a_target_that_is_checked_out_elsewhere_is_an_obstacle_and_no_sha_is_made_up""",
    "lost-update-without-cas": """
        cases/landing_cases::two_runs_that_land_at_once_lose_nothing
        promotion_races::ten_workers_promoted_by_ten_processes_land_once_each""",
    "clean-merge-broken-program": """
        cases/landing_cases::a_clean_merge_that_its_declared_check_finds_broken_does_not_land
        cases/landing_cases::without_declared_checks_what_merges_cleanly_lands""",
    "signing-hangs": """
        cases/landing_cases::a_landing_without_a_terminal_an_identity_or_a_signing_key_waits_for_nobody
        promote::settings_and_hooks_of_the_repository_have_no_say_in_a_landing""",
    "no-identity-at-merge": """
        cases/landing_cases::a_landing_without_a_terminal_an_identity_or_a_signing_key_waits_for_nobody
        repositories::without_an_identity_the_commits_carry_lionwts_own""",
    "rerere-resolves-silently": """
        cases/landing_cases::no_setting_changes_what_lands_or_what_a_conflict_leaves""",
    "branch-d-vs-squash-and-upstream": """
        cases/landing_cases::what_somebody_landed_by_hand_is_not_landed_again_nor_claimed
        teardown::a_branch_that_moved_after_the_freeze_is_kept""",
    "dubious-ownership": """
        repositories::a_repository_of_somebody_else_is_refused_with_gits_own_words""",
    "symref-target-reaches-main": """
        cases/landing_cases::no_spelling_leads_a_landing_to_a_protected_branch_or_past_a_name
        names::a_landing_never_targets_a_protected_branch_under_any_of_its_names
        names::a_symbolic_branch_is_resolved_to_the_branch_it_stands_for""",
    "tip-equality-vs-ancestry": """
        cases/landing_cases::a_landing_that_the_target_has_left_behind_is_still_known_as_landed""",
    # Names, records, locks, clocks.
    "path-identity-through-symlink": """
        cases/repository_cases::every_spelling_of_a_place_leads_to_the_same_lease
        repositories::a_path_may_hold_spaces_quotes_newlines_and_bytes_that_are_no_text""",
    "newline-in-worktree-path": """
        cases/state_cases::names_that_are_no_text_go_through_records_and_answers
        repositories::a_path_may_hold_spaces_quotes_newlines_and_bytes_that_are_no_text""",
    "torn-state-file": """
        cases/state_cases::a_torn_record_is_never_no_record_for_any_verb
        store::a_lease_file_that_is_ambiguous_is_named_left_and_never_no_lease""",
    "fixed-temp-name": """
        cases/state_cases::writers_at_once_leave_one_whole_record
        store::a_write_that_is_interrupted_before_its_rename_leaves_the_old_file""",
    "lock-file-unlinked-two-holders": """
        cases/state_cases::a_lock_file_is_the_same_from_the_first_lease_to_the_last_teardown""",
    "pid-reuse": """
        cases/state_cases::an_owner_is_more_than_a_pid
        processes::an_owner_is_known_again_after_the_clock_was_set""",
    "suspended-holder": """
        cases/state_cases::behind_a_suspended_holder_the_wait_ends_and_nothing_is_stolen
        promotion_races::a_lock_that_is_held_too_long_is_busy_and_changes_nothing""",
    "clock-jump-expiry": """
        cases/state_cases::a_clock_that_jumped_reaps_nothing_early
        reconcile::a_clock_that_runs_backwards_deletes_nothing""",
    "json-non-utf8-path": """
        cases/state_cases::names_that_are_no_text_go_through_records_and_answers
        store::a_repository_whose_path_is_no_text_round_trips""",
    "leading-dash-arguments": """
        cases/state_cases::an_id_that_is_not_already_safe_is_refused_and_never_rewritten
        cli::an_unsafe_worker_id_is_refused_wherever_it_stands
        cli::a_dash_dash_ends_the_options""",
}


def functions(module: Path) -> set[str]:
    """The tests of a module, by their names."""
    tree = ast.parse(module.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


@pytest.mark.parametrize("case", CASES)
def test_every_reported_failure_has_tests_that_exist(case: str) -> None:
    """A case without a test, or with one that was renamed away, is not handled."""
    shown = CASES[case].split()
    assert shown and len(set(shown)) == len(shown)
    for name in shown:
        where, _, function = name.partition("::")
        folder, _, stem = where.rpartition("/")
        module = TESTS / folder / f"test_{stem}.py"
        assert module.is_file(), name
        assert f"test_{function}" in functions(module), name


def test_every_test_of_this_folder_belongs_to_a_case() -> None:
    """What stands in these files stands there for a reported failure, or for a sibling of one."""
    named = {name.partition("::")[2] for shown in CASES.values() for name in shown.split()}
    for module in sorted(Path(__file__).parent.glob("test_*_cases.py")):
        for function in sorted(functions(module)):
            if function.startswith("test_") and module.stem != "test_submodule_cases":
                assert function.removeprefix("test_") in named, f"{module.stem}::{function}"


def test_the_cases_are_named_alike() -> None:
    """One word per case, as in the code's comments."""
    assert len(CASES) >= 88
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", case) for case in CASES)
