// Keeps the page live: asks for it again, and changes in place only what has changed, so that the
// reader's place, focus and selection stay.  A page that nobody looks at asks for nothing.
"use strict";

const EVERY_MS = 2000;
const SLOWEST_MS = 30000; // while nobody answers
const PATIENCE_MS = 8000;
const live = document.getElementById("live");
const pause = document.getElementById("pause");
const main = document.querySelector("main");
let seen = new Date();
let every_ms = EVERY_MS;
let timer = 0;
let paused = false;

function say(words, tone) {
  if (live.textContent !== words) live.textContent = words; // a reader is told of each change
  live.className = tone;
}

// Make `old` equal to `fresh`, which is used up.
function mend(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  let at = old.firstChild;
  for (const next of [...fresh.childNodes]) {
    const same = next.id && [...old.children].find((child) => child.id === next.id);
    if (same && same !== at) {
      old.insertBefore(same, at);
      at = same;
    }
    if (!at || at.nodeName !== next.nodeName || (at.id || "") !== (next.id || "")) {
      old.insertBefore(next, at);
      continue;
    }
    if (at.nodeType === Node.ELEMENT_NODE) mend(at, next);
    else if (at.data !== next.data) at.data = next.data;
    at = at.nextSibling;
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

async function ask() {
  const answer = await fetch(location.pathname, {
    cache: "no-store",
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const version = fresh.documentElement.dataset.version;
  if (!answer.ok || !version) throw new Error(`the page was answered with ${answer.status}`);
  if (version !== document.documentElement.dataset.version) {
    location.reload(); // umad was upgraded: its style and this script may be others
    return;
  }
  mend(main, fresh.querySelector("main"));
  document.title = fresh.title;
}

async function turn() {
  clearTimeout(timer);
  if (paused || document.hidden) return;
  try {
    await ask();
    seen = new Date();
    every_ms = EVERY_MS;
    if (!paused) say("Live", "good");
  } catch {
    every_ms = Math.min(2 * every_ms, SLOWEST_MS);
    if (!paused) say(`Not live since ${seen.toLocaleTimeString()}`, "bad");
  }
  clearTimeout(timer);
  timer = setTimeout(turn, every_ms);
}

pause.addEventListener("click", () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", String(paused));
  if (paused) say(`Paused at ${seen.toLocaleTimeString()}`, "");
  else turn();
});
document.addEventListener("visibilitychange", turn);
pause.hidden = false;
turn();
