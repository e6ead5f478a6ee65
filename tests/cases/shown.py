"""Where each invariant and each fault is shown: the one table, which a test holds against the tests that there are.

A place is "file::test", with the file from `tests/` on. What is named in the text of a test is not repeated here: the
table has the places of those that nobody names.
"""

from typing import Final

INVARIANTS: Final = {f"I{number:02}" for number in range(1, 43)}
FAULTS: Final = {f"F{number:02}" for number in range(1, 41)}
CASES: Final = {f"C{number:02}" for number in range(1, 29)}

SHOWN: Final = {
    "I03": ("hicache/test_tree.py::test_i03_a_hash_of_eight_bits_finds_no_wrong_page",),
    "I06": (
        "hicache/test_tree.py::test_only_whole_pages_match",
        "hicache/test_cache.py::test_at_most_all_but_the_last_token_come_from_the_cache",
    ),
    "I07": ("hicache/test_tree.py::test_a_match_is_read_only_however_often",
            "hicache/test_tree.py::test_a_walk_tells_what_is_there"),
    "I15": ("faults/test_power_cuts.py::test_what_is_durable_survives_and_nothing_reads_wrong_fast",
            "faults/test_machine.py::test_power_cut_images_hold_what_was_durable"),
    "I16": ("faults/test_every_call.py::test_the_end_comes_in_every_call",
            "faults/test_power_cuts.py::test_what_is_durable_survives_and_nothing_reads_wrong"),
    "I17": ("faults/test_damage.py::test_c26_damaged_directories_start_and_serve_nothing_wrong",
            "tiers/test_nvme_directory.py::test_files_in_the_directory_that_are_not_the_stores_are_left_alone"),
    "F01": ("faults/test_machine.py::test_a_full_disk_without_reserved_blocks_fails_writes_alone_and_comes_back",
            "faults/test_every_call.py::test_every_call_fails_once"),
    "F02": ("faults/test_machine.py::test_a_disk_that_others_fill_stops_neither_pages_nor_journal",
            "cases/test_metadata.py::test_c24_an_append_that_fails_half_way_leaves_a_log_that_is_read"),
    "F03": ("faults/test_machine.py::test_without_inodes_the_start_is_refused_and_nothing_is_left",),
    "F04": ("hicache/test_failing_disk.py::test_a_read_that_fails_once_costs_a_hit_and_no_page",
            "hicache/test_failing_disk.py::test_a_disk_that_fails_under_a_step_is_asked_again_later"),
    "F05": ("tiers/test_nvme_health.py::test_a_device_that_fails_again_and_again_is_down_and_comes_back_by_itself",
            "tiers/test_nvme_faults.py::test_c10_a_page_that_cannot_be_written_fails_alone_in_its_run"),
    "F06": ("tiers/test_nvme_restart.py::test_i18_a_failed_flush_loses_its_pages_and_says_so",
            "tiers/test_nvme_failed_flush.py::test_one_flush_that_fails_is_made_good"),
    "F07": ("tiers/test_nvme_faults.py::test_c11_a_read_in_two_halves_is_continued_and_its_neighbours_are_right",
            "tiers/test_nvme_faults.py::test_a_device_that_moves_little_at_a_time_is_followed_to_the_end"),
    "F08": ("tiers/test_simulated_disk.py::test_a_write_that_was_not_synced_is_there_gone_or_torn_at_sectors",
            "faults/test_power_cuts.py::test_what_is_durable_survives_and_nothing_reads_wrong"),
    "F09": ("tiers/test_nvme_reads.py::test_a_lost_write_is_a_miss_in_either_life_of_the_slot",
            "tiers/test_nvme_reads.py::test_a_misdirected_write_is_a_miss_for_both_its_victims"),
    "F11": ("cases/test_failed_io.py::test_c11_a_file_that_was_cut_before_the_start_serves_the_pages_before_the_cut",
            "tiers/test_nvme_directory.py::test_any_damaged_file_leads_to_a_start"),
    "F12": ("tiers/test_nvme_recovery.py::test_c24_a_log_cut_at_any_byte_gives_the_rounds_before",
            "tiers/test_nvme_recovery.py::test_c24_flipped_bits_give_a_state_that_was_or_nothing"),
    "F13": ("faults/test_machine.py::test_a_file_system_that_shuts_down_ends_nothing_but_io",),
    "F14": ("faults/test_machine.py::test_a_file_system_that_turns_read_only_goes_on_serving",
            "faults/test_machine.py::test_a_read_only_file_system_is_refused_at_start_and_stays_as_it_is"),
    "F15": ("faults/test_machine.py::test_a_user_without_rights_is_refused_what_is_not_his_and_served_what_is",),
    "F16": ("faults/test_machine.py::test_a_file_system_without_direct_io_and_reservation_is_used_with_a_note",),
    "F19": ("faults/test_power_cuts.py::test_what_is_durable_survives_and_nothing_reads_wrong_fast",
            "faults/test_machine.py::test_power_cut_images_hold_what_was_durable"),
    "F20": ("faults/test_kills.py::test_seventy_kills_lose_nothing",
            "faults/test_every_call.py::test_the_end_comes_in_every_call",
            "service/test_sessions.py::test_clients_find_a_restarted_server_by_themselves_and_nvme_warm"),
    "F24": ("tiers/test_host.py::test_a_tier_that_cannot_be_pinned_says_so_once_and_works",),
    "F28": ("hicache/test_clock.py::test_a_step_of_the_wall_clock_leaves_monotonic_time_alone",
            "test_structure.py::test_every_source_file_keeps"),
    "F30": ("faults/test_damage.py::test_a_directory_of_another_version_is_refused_and_stays_as_it_is",
            "service/test_hostile.py::test_fields_of_another_version"),
    "F36": ("hicache/test_cache_cancellation.py::test_a_request_is_struck_at_every_wait",
            "hicache/test_cache_cancellation.py::test_the_deadline_passes_at_every_wait"),
    "F37": ("hicache/test_movers.py::test_a_tier_that_raises_costs_its_batch_and_no_worker",
            "tiers/test_nvme_faults.py::test_a_copy_that_raises_what_no_device_raises_is_an_error_and_the_thread_lives"),
}  # fmt: skip
"""Places of what no test names, or where naming alone would not lead a reader to the main one."""
