// Numbers as people read them, and elements as the other modules make them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const NAMES = { host: "host", nvme: "NVMe", device: "device" };

/** Bytes with three digits: "1.25 GiB". */
export function bytes(count) {
  let unit = 0;
  while (count >= 1023.5 && unit < UNITS.length - 1) [count, unit] = [count / 1024, unit + 1];
  return `${unit ? digits(count) : Math.round(count)} ${UNITS[unit]}`;
}

/** A whole number with its thousands apart. */
export const whole = (count) => Math.round(count).toLocaleString("en");

/** A large number with three digits: "12.3 k". */
export function short(count) {
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (count >= size) return `${digits(count / (letter === "k" ? 1e3 : size))} ${letter}`;
  }
  return whole(count);
}

export function seconds(count) {
  if (count === 0) return "0 s";
  if (count < 0.0995) return `${Math.round(1000 * count)} ms`;
  for (const [size, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (count >= 2 * size) return `${digits(count / size)} ${name}`;
  }
  return `${digits(count)} s`;
}

export const share = (part) => (part === null || Number.isNaN(part) ? "–" : `${(100 * part).toFixed(1)} %`);

export const plural = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

/** A tier or a lane by its name. */
export const named = (name) => name.split("->").map((tier) => NAMES[tier] ?? tier).join(" → ");

/** A new element; properties that are no attributes of HTML's are set by `aria-`, `data-` and the like. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function digits(count) {
  return count >= 99.95 ? count.toFixed(0) : count >= 9.995 ? count.toFixed(1) : count.toFixed(2);
}
