import { html, table } from './dom.js';
import { countOf, duration, hitRatio, percent, short, sum, together } from './format.js';

const WINDOWS = new Map([[300, '5 min'], [3600, '1 h'], [86400, '24 h']]);
const tokens = (work) => sum(work.saved_tokens);
const prefill = (ms) => (ms === 0 ? '–' : duration(ms / 1000));
const WAITS = { loaded: 'KV loaded', computed: 'KV computed', mixed: 'both, or vLLM’s own cache' };

/** The mean wait for a first token, in words; empty if nothing was counted. */
const wait = (waits, kind) => (waits?.[kind] ? duration(waits[`${kind}_ms`] / waits[kind] / 1000) : '');
const waitsOf = (work, model) => (Object.hasOwn(work.first_tokens, model) ? work.first_tokens[model] : null);
/** The waits of all models together. */
const allWaits = (work) => together(Object.values(work.first_tokens));

/** How long requests waited for their first token, a row for each model and origin of KV; empty if no sidecar asks its vLLM. */
function waits(data) {
  const day = data.windows.at(-1).work;
  const rows = Object.keys(day.first_tokens).sort().flatMap((model) => Object.keys(WAITS).filter((kind) => day.first_tokens[model][kind]).map((kind) => [model, kind]));
  if (rows.length === 0) return [];
  const cell = (work, model, kind) => {
    const found = waitsOf(work, model);
    const mean = wait(found, kind);
    return mean === '' ? '–' : html('div', { 'data-wait': kind, 'data-value': found[`${kind}_ms`] / found[kind] }, mean, html('div', { class: 'faint' }, `of ${short(found[kind])}`));
  };
  const columns = [
    ['Prompts', ([model, kind]) => html('div', {}, html('span', { class: 'wrap' }, model), html('div', { class: 'faint' }, WAITS[kind]))],
    ...data.windows.map((one) => [WINDOWS.get(one.window_s), ([model, kind]) => cell(one.work, model, kind), true]),
  ];
  return [table('Mean time to first token, by vLLM’s metrics', columns, rows, ([model, kind]) => `${model} ${kind}`)];
}

/** What each tenant has saved, a row for each; empty unless the caller may see several. */
function tenants(data) {
  if (data.tenants.length < 2) return [];
  const columns = [
    ['Tenant', (one) => html('span', { class: 'wrap' }, one.tenant)],
    ...data.windows.map(({ window_s: length }, i) => [WINDOWS.get(length), (one) => short(one.saved_tokens[i]), true]),
    ['Prefill, 24 h', (one) => prefill(one.saved_ms), true, true],
  ];
  return [table('Tokens not computed, by tenant', columns, data.tenants, (one) => `tenant ${one.tenant}`)];
}

/** What the cache has saved: a tile for each window, and a table by model. */
export function gains(data) {
  const tile = ({ window_s: length, watched_s: watched, work }) => {
    const saved = sum(work.saved_ms);
    const ratio = hitRatio(work);
    const all = allWaits(work);
    const first = ['loaded', 'computed'].filter((kind) => all[kind]).map((kind) => `${wait(all, kind)} ${kind}`).join(', ');
    const notes = [
      saved === 0 ? null : `${duration(saved / 1000)} of prefill`,
      ratio === null ? null : `hit ratio ${percent(ratio)}`,
      first === '' ? null : `first token after ${first}`,
    ];
    const title = `Last ${WINDOWS.get(length)}${watched < length ? ` (watched for ${duration(watched)})` : ''}`;
    const figure = html('dd', { 'data-gain': length, 'data-value': tokens(work) }, `${short(tokens(work))} tokens`);
    return html('div', {}, html('dt', {}, title), figure, html('dd', { class: 'sub' }, notes.filter(Boolean).join(', ') || 'nothing was loaded'));
  };
  const day = data.windows.at(-1).work;
  const models = Object.keys(day.saved_tokens).sort((a, b) => day.saved_tokens[b] - day.saved_tokens[a]);
  const tiles = html('dl', { class: 'gains' }, ...data.windows.map(tile));
  if (models.length === 0) return [tiles, ...tenants(data), ...waits(data)];
  const columns = [
    ['Model', (model) => html('span', { class: 'wrap' }, model)],
    ...data.windows.map((one) => [WINDOWS.get(one.window_s), (model) => short(countOf(one.work.saved_tokens, model)), true]),
    ['Prefill, 24 h', (model) => prefill(countOf(day.saved_ms, model)), true, true],
  ];
  return [tiles, table(`Tokens not computed, tenant ${data.tenant}`, columns, models, (model) => model), ...tenants(data), ...waits(data)];
}
