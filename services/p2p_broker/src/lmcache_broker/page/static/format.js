const UNITS = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];
const TIERS = { LocalCPUBackend: 'memory', Hot: 'memory', LocalDiskBackend: 'disk', P2PBackend: 'peers', RemoteBackend: 'storage' };
const COLOURS = new Map([['memory', 's0'], ['peers', 's1'], ['storage', 's2'], ['disk', 's3']]);

export function bytes(count) {
  let unit = 0;
  for (; count >= 999.5 && unit < UNITS.length - 1; unit++) count /= 1000;
  return `${unit === 0 || count >= 99.95 ? Math.round(count) : count.toFixed(1)} ${UNITS[unit]}`;
}
export const number = (count) => count.toLocaleString('en');
export const percent = (part) => `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;
export const tier = (name) => (Object.hasOwn(TIERS, name) ? TIERS[name] : name);
/** The same colour for a tier wherever it is drawn; what has none of its own shares one. */
export const colour = (name) => COLOURS.get(tier(name)) ?? 's4';
export const words = (name) => name.replaceAll('_', ' ');
export const sum = (counts) => Object.values(counts).reduce((all, count) => all + count, 0);
export const clock = (ms) => new Date(ms).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' });
export const shorten = (text, length) => (text.length <= length ? text : `${text.slice(0, 4)}…${text.slice(5 - length)}`);

/** All these counts together, by name. Peers choose names: this has none of its own, as an ordinary object has. */
export function together(all) {
  const found = Object.create(null);
  for (const counts of all) for (const [name, count] of Object.entries(counts)) found[name] = (found[name] ?? 0) + count;
  return found;
}

/** Chunks got, of those that were wanted and either got or missed; null where none was. */
export function hitRatio(work) {
  const loaded = sum(work.loaded_chunks);
  const all = loaded + sum(work.missed_chunks);
  return all === 0 ? null : loaded / all;
}
