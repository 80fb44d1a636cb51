import { html, nothing, svg } from './dom.js';
import { bytes, clock, colour, hitRatio, percent, sum, together } from './format.js';

const HEIGHT = 160;
const LEFT = 70;
const TOP = 8;
const BOTTOM = 20;
const FLOOR = HEIGHT - BOTTOM;
const MIN_BAR = 4;
const MAX_BAR = 32;

/** Merge adjacent samples, always in the same groups, so that the bars fit into the width. */
function merged({ samples, interval_s: interval }, room) {
  const step = Math.max(1, Math.ceil((samples.length * MIN_BAR) / room));
  const groups = new Map();
  for (const sample of samples) {
    const group = Math.floor(sample.ended_ms / (1000 * interval * step));
    groups.set(group, [...(groups.get(group) ?? []), sample]);
  }
  return [...groups.values()].map((part) => ({
    ended_ms: part.at(-1).ended_ms,
    seconds: part.length * interval,
    loaded_bytes: together(part.map((one) => one.work.loaded_bytes)),
    loaded_chunks: together(part.map((one) => one.work.loaded_chunks)),
    missed_chunks: together(part.map((one) => one.work.missed_chunks)),
  }));
}

/** The next of 1, 2, 5, 10, 20, … */
function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((times) => times * unit >= value * (1 - 1e-9)) * unit;
}

function frame(width, label, ticks, bars, marks) {
  const lines = ticks.flatMap(([text, part]) => {
    const y = FLOOR - part * (FLOOR - TOP);
    return [
      svg('line', { class: 'axis', x1: LEFT, x2: width, y1: y, y2: y }),
      svg('text', { class: 'tick', x: LEFT - 8, y: y + 4, 'text-anchor': 'end' }, text),
    ];
  });
  const times = [
    svg('text', { class: 'tick', x: LEFT, y: HEIGHT - 4 }, clock(bars[0].ended_ms)),
    svg('text', { class: 'tick', x: width, y: HEIGHT - 4, 'text-anchor': 'end' }, clock(bars.at(-1).ended_ms)),
  ];
  return svg('svg', { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: 'img', 'aria-label': label }, ...lines, ...times, ...marks);
}

export function sourcesChart(data, width) {
  const totals = together(data.samples.map((sample) => sample.work.loaded_bytes));
  const names = Object.keys(totals).sort((a, b) => totals[b] - totals[a] || (a < b ? -1 : 1));
  if (names.length === 0) return nothing('Nothing was loaded while this broker watched.');
  const bars = merged(data, width - LEFT);
  const most = roundUp(Math.max(...bars.map((bar) => sum(bar.loaded_bytes) / bar.seconds)));
  const step = (width - LEFT) / bars.length;
  const thick = Math.max(1, Math.min(MAX_BAR, step > 3 * MIN_BAR ? 0.8 * step : step - 1));
  const marks = [];
  bars.forEach((bar, i) => {
    let y = FLOOR;
    names.forEach((name) => {
      const rate = (bar.loaded_bytes[name] ?? 0) / bar.seconds;
      if (rate === 0) return;
      const height = (rate / most) * (FLOOR - TOP);
      y -= height;
      const title = svg('title', {}, `${clock(bar.ended_ms)}: ${bytes(rate)}/s from ${name}`);
      marks.push(svg('rect', { class: colour(name), x: LEFT + (i + 0.5) * step - thick / 2, y, width: thick, height }, title));
    });
  });
  const said = names.map((name) => `${bytes(totals[name])} from ${name}`);
  const key = (name) => svg('svg', { width: 11, height: 11, 'aria-hidden': 'true' }, svg('rect', { class: colour(name), width: 11, height: 11, rx: 2 }));
  const entries = names.map((name, j) => html('li', { 'data-source': name, 'data-value': totals[name] }, key(name), said[j]));
  const ticks = [['0', 0], [`${bytes(most / 2)}/s`, 0.5], [`${bytes(most)}/s`, 1]];
  return html('figure', {}, frame(width, `Loaded over time: ${said.join(', ')}`, ticks, bars, marks), html('ul', { class: 'legend' }, ...entries));
}

export function ratioChart(data, width) {
  const bars = merged(data, width - LEFT);
  const ratios = bars.map(hitRatio);
  if (ratios.every((ratio) => ratio === null)) return nothing('Nothing was asked for while this broker watched.');
  const step = (width - LEFT) / bars.length;
  const runs = [[]];
  const all = [];
  const marks = [];
  ratios.forEach((ratio, i) => {
    if (ratio === null) {
      runs.push([]);
      return;
    }
    const [x, y] = [LEFT + (i + 0.5) * step, FLOOR - ratio * (FLOOR - TOP)];
    runs.at(-1).push(`${x.toFixed(1)},${y.toFixed(1)}`);
    all.push(runs.at(-1).at(-1));
    const title = svg('title', {}, `${clock(bars[i].ended_ms)}: ${percent(ratio)}`);
    marks.push(svg('circle', { class: 's0', cx: x, cy: y, r: step > 8 ? 3.5 : 2 }, title));
  });
  // Without requests there is no ratio: a dashed line leads over the gap.
  const bridge = svg('polyline', { class: 'line gap', points: all.join(' ') });
  const lines = runs.filter((run) => run.length > 1).map((run) => svg('polyline', { class: 'line', points: run.join(' ') }));
  const said = `${percent(ratios.findLast((ratio) => ratio !== null))} in the last interval with requests`;
  const ticks = [['0', 0], ['50 %', 0.5], ['100 %', 1]];
  return html('figure', {}, frame(width, `Hit ratio over time: ${said}`, ticks, bars, [bridge, ...lines, ...marks]), html('figcaption', {}, said));
}
