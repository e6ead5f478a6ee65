"""The demo's lines: what people read, to the letter."""

from hicache.tools.demo import report
from hicache.tools.demo.results import Comparison, DemoResult
from hicache.tools.terminal import Style, visible_length
from tests.tools.test_results import request, result

PLAIN = Style(width=120)
NARROW = Style(width=80)
COLOUR = Style(colour=True, width=120)


def text(lines: list[str]) -> str:
    return "\n".join(lines)


def test_the_header_says_what_is_about_to_run() -> None:
    shown = report.header(result(), nvme_place="in /var/tmp/x\x1b", num_requests=6, style=PLAIN)
    assert text(shown) == (
        """\
hicache demo  Tiny: 30 layers, 3 KV heads of 64, float32, on cpu
  2 documents, 12,800 tokens; a page holds 16 tokens in 720 KiB
  6 requests, seed 0; ranks of the documents follow Zipf's law

  working set    562 MiB
  device        70.3 MiB  ███·····················  1/8.0 of it
  host           281 MiB  ████████████············  1/2.0 of it
  NVMe           703 MiB  ████████████████████████  1.25 times it  in /var/tmp/x\\x1b
"""
    )


def test_a_request_is_one_line_below_its_head() -> None:
    found = result()
    lines = [*report.table_head(PLAIN), *(report.request_line(each, 6, PLAIN) for each in found.requests)]
    assert text(lines) == (
        """\
      #  document          prompt   device     host     NVMe computed       TTFT  answer
   1/6   argparse           1,900        -        -        -    1,900     4.00 s  Because it is.
   2/6   argparse           1,700    1,680        -        -       20     100 ms  Because it is.
   3/6   argparse           1,700       48    1,632        -       20     200 ms  Because it is.
   4/6   argparse           1,600       48        -    1,536       16     400 ms  Because it is.
   5/6   argparse+json      5,000       48    1,552        -    3,400     12.0 s  Because it is.
   6/6   argparse              40       32        -        -        8    10.0 ms  Because it is."""
    )


def test_lines_fit_their_style() -> None:
    wordy = request(1, 1_900, {"device": 900, "host": 500, "nvme": 300}, ttft_s=100.0)
    for style in (PLAIN, NARROW, COLOUR, Style(width=100), Style(width=99)):
        line = report.request_line(wordy, 41, style)
        assert visible_length(line) <= style.width
        assert ("Because" in line) == (style.width >= 100)
    assert "█" in report.request_line(wordy, 41, COLOUR)
    assert "\x1b" not in report.request_line(wordy, 41, PLAIN)


def test_hostile_names_and_answers_stay_on_their_line() -> None:
    hostile = request(1, 10, {})
    hostile = type(hostile)(**{
        **{name: getattr(hostile, name) for name in hostile.__slots__},
        "titles": ("a\x1b[2J\nb",), "answer": "one\ntwo \x1b]0;x\x07 three",
    })  # fmt: skip
    line = report.request_line(hostile, 1, PLAIN)
    assert line.isprintable()
    assert "one two \\x1b]0;x\\x07 three" in line


def test_the_summary_says_everything_and_the_verdict_last() -> None:
    assert text(report.summary(result(), PLAIN)) == (
        """
Prompt tokens: 11,940, hit rate 55.1%
  device           1,856  ██████▎·································   15.5%
  host             3,184  ██████████▋·····························   26.7%
  NVMe             1,536  █████▏··································   12.9%
  recomputed       5,364  ██████████████████······················   44.9%

Time to first token, median, prompts of 1,500 tokens or more
  from device     100 ms  █·······································  1 request    40.0 times faster
  from host       200 ms  ██······································  1 request    20.0 times faster
  from NVMe       400 ms  ████····································  1 request    10.0 times faster
  recomputed      4.00 s  ████████████████████████████████████████  1 request
  all hits        200 ms  20.0 times faster than recomputing (3 hits)

Larger than the device
  request 5 attended to 5,000 tokens, 3.1 times what the device holds; first token after 12.0 s, 3,400 tokens computed
  3 ordinary requests did not fit on the device

Bytes moved
  device → host       6.68 MiB
  NVMe → host         85.8 MiB
  host → NVMe         47.7 MiB
  the kernel counted 86.8 MiB read from block devices and 49.6 MiB written (/proc/self/io)

Tiers at the end
  device           100 B  ████████████████████████████████████████  100.0% of 100 B
  host             300 B  ██████████████████████████████··········   75.0% of 400 B
  NVMe               0 B  ········································    0.0% of 0 B

request 5 (recompute): near tie at token 4, where the plain run's best two logits are 0.0002 apart
identical outputs: 1/2, 1 near tie (two best logits within 0.001), largest logit difference 8e-05
against plain transformers generation; requests took 1 min 40 s, comparing 50.0 s"""
    )


def test_the_summary_of_a_run_with_a_difference_names_it() -> None:
    found = result()
    found.comparisons = [Comparison(3, "different", 0.7, 0, 0.5), Comparison(4, "different", float("inf"))]
    shown = report.summary(found, PLAIN)
    assert "request 3 (host): different at token 1, where the plain run's best two logits are 0.5 apart" in shown
    assert "request 4 (nvme): different at the end" in shown
    assert "identical outputs: 0/2, largest logit difference inf" in shown


def test_the_summary_tells_when_a_tier_served_nothing_or_the_disk_was_not_used() -> None:
    found = result()
    found.requests, found.comparisons = found.requests[:2], []
    found.device_io = None
    shown = text(report.summary(found, PLAIN))
    assert "No token came from host" in shown
    assert "No token came from NVMe" in shown
    assert "/proc/self/io cannot be read here" in shown
    found = result()
    assert found.device_io is not None
    found.device_io = type(found.device_io)(1_000, 0)
    assert "less than was read from NVMe: the file system keeps the NVMe tier in memory" in text(
        report.summary(found, PLAIN)
    )


def test_an_empty_run_is_drawn_too() -> None:
    found = result()
    empty = DemoResult(found.machine, found.model, [], found.budgets, 0, 1e-3)
    shown = text(report.summary(empty, PLAIN))
    assert "no prompt was that long" in shown
    assert "identical outputs: 0/0" in shown


def test_without_block_characters_everything_is_ascii() -> None:
    style = Style(unicode=False, width=120)
    found = result()
    lines = report.header(found, nvme_place="in x", num_requests=6, style=style) + report.summary(found, style)
    assert text(lines).isascii()
    assert text([report.request_line(each, 6, style) for each in found.requests]).isascii()


def test_a_comparison_is_one_line() -> None:
    found = result()
    lines = [report.compared_line(found.requests[each.number - 1], each, 1, 2, PLAIN) for each in found.comparisons]
    assert lines == [
        "   1/2   request   1,  1,900 tokens, mostly computed        same tokens, logits within 2.0e-05",
        "   1/2   request   5,  5,000 tokens, larger than the device near tie, logits within 8.0e-05",
    ]
