// Asks the server every two seconds while the page is seen, and shows what it says.

import { ask, Gone, Refused, setToken, takeToken } from "./api.js";
import { Cards } from "./cards.js";
import { Details } from "./details.js";
import { element, named, plural, seconds, short, whole } from "./format.js";
import { Icicle } from "./icicle.js";

const EVERY_MS = 2000;
/** While the server has not walked through all of the tree yet. */
const SOON_MS = 100;
/** A picture that is older is told to be. */
const OLD_S = 10;
const find = (id) => document.getElementById(id);

const cards = new Cards();
const details = new Details(find("details"), (number, signal) => ask("prefix", { id: number }, signal), zoom);
const icicle = new Icicle(find("icicle"), { look: (branch, more) => details.look(branch, more), zoom });
let isPaused = false;
/** Prefixes that the tree is seen from, those before it last. */
let focus = 0;
let above = [];
let timer = null;
let underWay = null;

/** Ask for all, show it, and do so again after a while. What was under way before is given up. */
async function turn() {
  clearTimeout(timer);
  underWay?.abort();
  const mine = (underWay = new AbortController());
  let wait = EVERY_MS;
  const span = document.querySelector("[name=span]:checked").value;
  try {
    const [now, picture] = await Promise.all([
      ask("now", { span: span, first: cards.nextRow(span) }, mine.signal),
      ask("tree", { focus }, mine.signal),
    ]);
    if (mine.signal.aborted) return;
    if (cards.isStale(now)) return turn();
    show(now, span);
    showTree(picture);
    tell(isPaused ? "paused" : "live");
    wait = picture.is_whole ? EVERY_MS : SOON_MS;
  } catch (error) {
    if (mine.signal.aborted) return;
    mine.abort();
    if (error instanceof Refused) return enter("This server does not know the token: it was started again, or is another one.");
    if (error instanceof Gone && focus !== 0) return zoom(above.pop() ?? 0);
    tell("lost");
  }
  if (!isPaused && !document.hidden) timer = setTimeout(turn, wait);
}

function zoom(number) {
  if (find("details").contains(document.activeElement)) find("icicle").querySelector("[tabindex='0']").focus();
  focus = number;
  turn();
}

function show(now, span) {
  const { server, sessions } = now;
  const leases = plural(now.num_leases, "lease");
  find("about").textContent =
    `version ${server.version}, up ${seconds(server.up_s)}, ${plural(sessions.length, "session")}, ${leases}` +
    (now.draining ? ", draining" : "");
  const troubles = Object.entries(now.tiers).filter(([, tier]) => tier.down !== null);
  find("trouble").hidden = troubles.length === 0;
  find("trouble").textContent = troubles.map(([tier, { down }]) => `${named(tier)} takes no new pages: ${down}`).join(". ");
  cards.show(now, span);
  showTotals(now);
}

function showTotals({ counters, num_nodes, server, pins }) {
  const pages = (by, how) => Object.entries(by).map(([name, count]) => `${named(name)} ${whole(count)}${how}`);
  const left = [...pages(counters.evicted_pages, " (kept elsewhere)"), ...pages(counters.dropped_pages, " (lost)")];
  const wrong = [...pages(counters.failed_moves, " not moved"), ...pages(counters.corrupt_pages, " corrupt")];
  const totals = {
    Prefixes: whole(num_nodes),
    "Looked up": `${whole(counters.lookups)}, ${whole(counters.hits)} with a hit`,
    "Tokens asked for": short(counters.tokens_asked),
    Stored: plural(server.commits, "commit"),
    Pinned: plural(pins.pages, "page"),
    "Pages that left": left.join(", ") || "none",
    "Refused by NVMe": pages(counters.refused_pages, "").join(", ") || "none",
    "Gone wrong": wrong.join(", ") || "nothing",
  };
  find("totals").replaceChildren(
    ...Object.entries(totals).map(([name, told]) => element("div", {}, element("dt", {}, name), element("dd", {}, told))),
  );
}

function showTree(picture) {
  focus = picture.focus;
  above = picture.path.map((each) => each.id);
  icicle.show(picture);
  const { of, met, expected, is_whole: isWhole, as_of_s: age, branches } = picture;
  const known = plural(branches.filter((each) => each.kind === "prefix").length, "prefix", "prefixes");
  find("progress").textContent = !isWhole
    ? `looked at ${whole(Math.min(met, expected))} of ${whole(expected)} prefixes`
    : `${known} of ${whole(of)}` + (age > OLD_S ? `, as of ${seconds(age)} ago` : "");
  const here = branches[0];
  const crumbs = picture.path.map(({ id, label }) => element("li", {}, element("button", { onclick: () => zoom(id) }, label)));
  find("path").replaceChildren(...crumbs, element("li", { "aria-current": "location" }, here.label));
  const tiers = new Set(branches.flatMap((branch) => Object.keys(branch.total.tiers)));
  find("legend").replaceChildren(
    ...["device", "host", "nvme"].filter((tier) => tiers.has(tier)).map((tier) => legend(tier, named(tier))),
    legend("coming", "on its way"),
    legend("leased", "leased"),
    legend("more", "more, too small to be shown"),
  );
}

const legend = (colour, text) => element("li", {}, element("i", { className: `swatch ${colour}` }), text);

function tell(state) {
  const said = { live: "live", paused: "paused", lost: "no answer; asking again" }[state];
  if (find("state").textContent !== said) find("state").textContent = said;
  find("state").className = state;
}

/** Ask for the token. */
function enter(why) {
  clearTimeout(timer);
  find("main").hidden = true;
  find("entry").hidden = false;
  find("entry-why").textContent = why;
  tell("paused");
  find("token").focus();
}

function begin() {
  find("entry").hidden = true;
  find("main").hidden = false;
  turn();
}

find("entry").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(find("token").value);
  find("token").value = "";
  begin();
});
find("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  find("pause").setAttribute("aria-pressed", String(isPaused));
  turn();
});
find("spans").addEventListener("change", turn);
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden && !isPaused && find("entry").hidden) turn();
});

if (takeToken()) begin();
else enter("");
