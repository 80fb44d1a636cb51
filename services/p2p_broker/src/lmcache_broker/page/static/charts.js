import { html, svg } from './dom.js';
import { bytes, clock, hitRatio, percent, sum, tier } from './format.js';

const HEIGHT = 150;
const LEFT = 62;
const BOTTOM = 18;
const MIN_BAR = 4;
const NUM_COLOURS = 6;

/** Neighbouring samples together, so that there are no more bars than there is room for. */
function merged(samples, room) {
  const step = Math.max(1, Math.ceil((samples.length * MIN_BAR) / room));
  const found = [];
  for (let end = samples.length; end > 0; end -= step) {
    const part = samples.slice(Math.max(0, end - step), end);
    const work = { loaded_bytes: {}, loaded_chunks: {}, missed_chunks: {} };
    for (const sample of part)
      for (const [name, counts] of Object.entries(work))
        for (const [key, count] of Object.entries(sample.work[name])) counts[key] = (counts[key] ?? 0) + count;
    found.unshift({ ended_ms: part.at(-1).ended_ms, work });
  }
  return found;
}

function frame(width, label, top, samples, marks) {
  const axis = [
    svg('line', { class: 'axis', x1: LEFT, x2: width, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
    svg('text', { class: 'tick', x: LEFT - 6, y: 12, 'text-anchor': 'end' }, top),
    svg('text', { class: 'tick', x: LEFT - 6, y: HEIGHT - BOTTOM, 'text-anchor': 'end' }, '0'),
    svg('text', { class: 'tick', x: LEFT, y: HEIGHT - 4 }, clock(samples[0].ended_ms)),
    svg('text', { class: 'tick', x: width, y: HEIGHT - 4, 'text-anchor': 'end' }, clock(samples.at(-1).ended_ms)),
  ];
  return svg('svg', { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: 'img', 'aria-label': label }, ...axis, ...marks);
}

const nothing = (text) => html('p', { class: 'note' }, text);

export function sourcesChart(data, width) {
  const totals = {};
  for (const { work } of data.samples) for (const [name, count] of Object.entries(work.loaded_bytes)) totals[name] = (totals[name] ?? 0) + count;
  const names = Object.keys(totals).sort((a, b) => totals[b] - totals[a] || (a < b ? -1 : 1));
  if (names.length === 0) return nothing('Nothing was loaded while this broker watched.');
  const bars = merged(data.samples, width - LEFT);
  const most = Math.max(...bars.map((bar) => sum(bar.work.loaded_bytes)));
  const step = (width - LEFT) / bars.length;
  const scale = (HEIGHT - BOTTOM - 4) / most;
  const marks = [];
  bars.forEach((bar, i) => {
    let y = HEIGHT - BOTTOM;
    names.forEach((name, j) => {
      const height = (bar.work.loaded_bytes[name] ?? 0) * scale;
      if (height === 0) return;
      y -= height;
      const place = { x: LEFT + i * step, y, width: Math.max(1, Math.min(24, step - 1)), height };
      const title = `${clock(bar.ended_ms)}: ${bytes(bar.work.loaded_bytes[name])} from ${tier(name)}`;
      marks.push(svg('rect', { class: `s${Math.min(j, NUM_COLOURS - 1)}`, ...place }, svg('title', {}, title)));
    });
  });
  const said = names.map((name) => `${bytes(totals[name])} from ${tier(name)}`);
  const entries = names.map((name, j) =>
    html('li', { 'data-source': name, 'data-value': totals[name] },
      svg('svg', { width: 11, height: 11, 'aria-hidden': 'true' }, svg('rect', { class: `s${Math.min(j, NUM_COLOURS - 1)}`, width: 11, height: 11 })), said[j]));
  return html('figure', {}, frame(width, `Loaded over time: ${said.join(', ')}`, bytes(most), bars, marks), html('ul', { class: 'legend' }, ...entries));
}

export function ratioChart(data, width) {
  const bars = data.samples.length === 0 ? [] : merged(data.samples, width - LEFT);
  const ratios = bars.map((bar) => hitRatio(bar.work));
  if (ratios.every((ratio) => ratio === null)) return nothing('Nothing was asked for while this broker watched.');
  const step = (width - LEFT) / bars.length;
  const points = ratios.map((ratio, i) => (ratio === null ? null : [LEFT + (i + 0.5) * step, HEIGHT - BOTTOM - ratio * (HEIGHT - BOTTOM - 6)]));
  const drawn = points.filter((point) => point !== null);
  const marks = [svg('polyline', { class: 'line', points: drawn.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(' ') })];
  points.forEach((point, i) => {
    if (point !== null)
      marks.push(svg('circle', { class: 's0', cx: point[0], cy: point[1], r: 3 }, svg('title', {}, `${clock(bars[i].ended_ms)}: ${percent(ratios[i])}`)));
  });
  const last = ratios.filter((ratio) => ratio !== null).at(-1);
  const said = `${percent(last)} when something was last asked for`;
  return html('figure', {}, frame(width, `Hit ratio over time: ${said}`, '100 %', bars, marks), html('figcaption', {}, said));
}
