// What the page asks the server. The token comes with the address, behind its #, and is kept for this tab alone.

const KEY = "hicache-token";

/** The server does not know our token. */
export class Refused extends Error {}
/** What was asked about is not there any more. */
export class Gone extends Error {}

/** Take the token out of the address, where it would be seen and remembered. */
export function takeToken() {
  if (location.hash.length > 1) {
    setToken(location.hash);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEY) !== null;
}

/** Keep a token, which may come with the address before it. */
export function setToken(text) {
  sessionStorage.setItem(KEY, text.slice(text.lastIndexOf("#") + 1).trim());
}

/** Ask for one of /data/…; throws as named above, and `TypeError` where nobody answers. */
export async function ask(what, parameters, signal) {
  const token = sessionStorage.getItem(KEY) ?? "";
  const headers = { Authorization: `Bearer ${encodeURIComponent(token)}` };
  const reply = await fetch(`data/${what}?${new URLSearchParams(parameters)}`, { headers, signal });
  if (reply.status === 401) throw new Refused();
  if (!reply.ok) throw new Error(await reply.text());
  const told = await reply.json();
  if ("gone" in told) throw new Gone(told.gone);
  return told;
}
