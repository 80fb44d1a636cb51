import { html, table } from './dom.js';
import { countOf, duration, hitRatio, percent, short, sum } from './format.js';

const WINDOWS = new Map([[300, '5 min'], [3600, '1 h'], [86400, '24 h']]);
const tokens = (work) => sum(work.saved_tokens);
const titleOf = ({ window_s: length }) => WINDOWS.get(length);
const prefill = (ms) => (ms === 0 ? '–' : duration(ms / 1000));

/** What each tenant has saved, a row for each; empty unless the caller may see several. */
function tenants(data, windows) {
  if (data.tenants.length < 2) return [];
  const columns = [
    ['Tenant', (one) => html('span', { class: 'wrap' }, one.tenant)],
    ...windows.map((shown) => [titleOf(shown), (one) => short(one.saved_tokens[data.windows.indexOf(shown)]), true]),
    [`Prefill, ${titleOf(windows.at(-1))}`, (one) => prefill(one.saved_ms), true, true],
  ];
  return [table('Tokens not computed, by tenant', columns, data.tenants, (one) => `tenant ${one.tenant}`)];
}

/** What the cache has saved: a tile for each window, and a table by model. */
export function gains(data) {
  // Without those that reach no further back than a smaller one, since this broker is young.
  const windows = data.windows.filter((one, i) => i === 0 || one.watched_s > data.windows[i - 1].watched_s);
  const tile = ({ window_s: length, watched_s: watched, work }) => {
    const saved = sum(work.saved_ms);
    const ratio = hitRatio(work);
    const notes = [
      saved === 0 ? null : `${duration(saved / 1000)} of prefill`,
      ratio === null ? null : `hit ratio ${percent(ratio)}`,
    ];
    const title = `Last ${WINDOWS.get(length)}${watched < length ? ` (watched for ${duration(watched)})` : ''}`;
    const figure = html('dd', { 'data-gain': length, 'data-value': tokens(work) }, `${short(tokens(work))} tokens`);
    return html('div', {}, html('dt', {}, title), figure, html('dd', { class: 'sub' }, notes.filter(Boolean).join(', ') || 'nothing was loaded'));
  };
  const day = data.windows.at(-1).work;
  const models = Object.keys(day.saved_tokens).sort((a, b) => day.saved_tokens[b] - day.saved_tokens[a]);
  const tiles = html('dl', { class: 'gains' }, ...windows.map(tile));
  if (models.length === 0) return [tiles, ...tenants(data, windows)];
  const columns = [
    ['Model', (model) => html('span', { class: 'wrap' }, model)],
    ...windows.map((one) => [titleOf(one), (model) => short(countOf(one.work.saved_tokens, model)), true]),
    [`Prefill, ${titleOf(windows.at(-1))}`, (model) => prefill(countOf(day.saved_ms, model)), true, true],
  ];
  return [tiles, table(`Tokens not computed, tenant ${data.tenant}`, columns, models, (model) => model), ...tenants(data, windows)];
}
