const UNITS = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];
const COUNT_UNITS = ['', 'k', 'M', 'G', 'T', 'P'];
const COLOURS = new Map([['memory', 's0'], ['peers', 's1'], ['storage', 's2'], ['disk', 's3']]);

export function bytes(count) {
  let unit = 0;
  for (; count >= 999.5 && unit < UNITS.length - 1; unit++) count /= 1000;
  return `${unit === 0 || count >= 99.95 ? Math.round(count) : count.toFixed(1)} ${UNITS[unit]}`;
}
export function duration(seconds) {
  if (seconds < 0.995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 99.5) return `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s`;
  if (seconds < 99.5 * 60) return `${(seconds / 60).toFixed(seconds < 597 ? 1 : 0)} min`;
  return `${(seconds / 3600).toFixed(seconds < 35_820 ? 1 : 0)} h`;
}
export const number = (count) => count.toLocaleString('en');

/** A large count in three digits: 9,870, 98.7 k, 4.56 M. */
export function short(count) {
  if (count < 9999.5) return number(Math.round(count));
  let unit = 0;
  for (; count >= 999.5 && unit < COUNT_UNITS.length - 1; unit++) count /= 1000;
  return `${count.toFixed(count < 9.995 ? 2 : count < 99.95 ? 1 : 0)} ${COUNT_UNITS[unit]}`;
}
export const percent = (part) => `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;
/** The colour of a tier, the same everywhere; tiers without their own share one. */
export const colour = (name) => COLOURS.get(name) ?? 's4';
export const words = (name) => name.replaceAll('_', ' ');
export const sum = (counts) => Object.values(counts).reduce((all, count) => all + count, 0);
/** The count under a name, which a peer chose: an inherited property is not a count. */
export const countOf = (counts, name) => (Object.hasOwn(counts, name) ? counts[name] : 0);
export const clock = (ms) => new Date(ms).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' });
/** The common prefix of these names, up to a dash (or another mark), such as a release's name; empty for a single name. */
export function commonPrefix(names, mark = '-') {
  if (names.length < 2) return '';
  const [first, last] = [names.reduce((a, b) => (a < b ? a : b)), names.reduce((a, b) => (a > b ? a : b))];
  let length = 0;
  while (length < first.length && first[length] === last[length]) length++;
  return first.slice(0, first.lastIndexOf(mark, length - 1) + 1);
}
const reversed = (text) => [...text].reverse().join('');
/** The common end of these names, from a dot on, such as a network's domain; empty for a single name. */
export const commonSuffix = (names) => reversed(commonPrefix(names.map(reversed), '.'));
export const shorten = (text, length) => (text.length <= length ? text : `${text.slice(0, 4)}…${text.slice(5 - length)}`);

/** The sums of these counts, by name. Peers choose names, so the result has no inherited properties. */
export function together(all) {
  const found = Object.create(null);
  for (const counts of all) for (const [name, count] of Object.entries(counts)) found[name] = (found[name] ?? 0) + count;
  return found;
}

/** Loaded chunks as a share of those loaded or missed; null if there are none. */
export function hitRatio(work) {
  const loaded = sum(work.loaded_chunks);
  const all = loaded + sum(work.missed_chunks);
  return all === 0 ? null : loaded / all;
}
