import { html, nothing, svg } from './dom.js';
import { bytes, colour, commonPrefix, number, shorten } from './format.js';

const MAX_DRAWN = 32;
const MAX_GAUGES = 3;
const ROW = 27;
const LINE = 14;
const GAUGE = 46;
const MIN_LINKS = 48; // room for arrows
const CHAR = 7.5; // width in a monospace font of 12 px, plus a margin

const describe = (peer) => {
  const place = [peer.zone && `zone ${peer.zone}`, peer.node && `node ${peer.node}`].filter(Boolean).join(', ');
  const room = (one) => (one.capacity_bytes ? ` of ${bytes(one.capacity_bytes)}` : '');
  const tiers = (peer.figures?.tiers ?? []).map((one) => `${one.name} ${bytes(one.used_bytes)}${room(one)}, ${number(one.num_chunks)} chunks`);
  return [`${peer.id}, ${peer.kind}${peer.draining ? ', draining' : ''}`, place, ...tiers].filter(Boolean).join('; ');
};

/** The draining peers and those with the most traffic, ordered by zone and node. */
function drawn({ peers, links }) {
  const traffic = new Map(peers.map((peer) => [peer.id, peer.draining ? Infinity : 0]));
  for (const one of links) for (const id of [one.requester, one.server]) if (traffic.has(id)) traffic.set(id, traffic.get(id) + one.num_bytes);
  const busiest = [...peers].sort((a, b) => (traffic.get(a.id) === traffic.get(b.id) ? 0 : traffic.get(b.id) - traffic.get(a.id)));
  const order = new Intl.Collator('en', { numeric: true }).compare;
  return busiest.slice(0, MAX_DRAWN).sort((a, b) => order(a.zone, b.zone) || order(a.node, b.node) || order(a.id, b.id));
}

function link(one, from, to, left, room, most) {
  const thickness = 1.5 + (3.5 * Math.log1p(one.num_bytes)) / Math.log1p(most);
  const reach = left + Math.min(room / 0.75, 30 + 0.6 * Math.abs(from - to));
  const [begin, end] = [from - 4, to + 4]; // separate points for peers that both serve and pull
  const path = `M${left},${begin} C${reach},${begin} ${reach},${end} ${left + 6},${end}`;
  const title = svg('title', {}, `${one.requester} pulled ${bytes(one.num_bytes)} from ${one.server}`);
  return svg('path', { class: 'link', d: path, 'stroke-width': thickness.toFixed(1), 'marker-end': 'url(#arrow)' }, title);
}

/** The lines of a name: two if it is longer than the room, broken behind a dash. */
function broken(name, room) {
  const end = name.lastIndexOf('-', room - 1) + 1;
  return name.length <= room || end === 0 ? [shorten(name, room)] : [name.slice(0, end), shorten(name.slice(end), room)];
}

function row(peer, lines, y, height, numChars, width) {
  const kind = `node ${peer.kind}${peer.draining ? ' draining' : ''}`;
  const mark = peer.kind === 'storage' ? svg('rect', { class: kind, x: 3, y: y - 7, width: 14, height: 14, rx: 2 }) : svg('circle', { class: kind, cx: 10, cy: y, r: 7.5 });
  const tiers = (peer.figures?.tiers ?? []).filter((one) => one.capacity_bytes > 0).slice(0, MAX_GAUGES);
  const x = 26 + numChars * CHAR;
  const gauges = tiers.flatMap((one, i) => {
    const place = { x, y: y - 3.5 * tiers.length + 7 * i + 1, height: 5, rx: 1 };
    const used = Math.min(1, one.used_bytes / one.capacity_bytes) * GAUGE;
    return [svg('rect', { class: 'track', ...place, width: GAUGE }), svg('rect', { class: colour(one.name), ...place, width: used.toFixed(1) })];
  });
  const first = y + 4 - (LINE * (lines.length - 1)) / 2;
  const parts = lines.map((line, i) => svg('tspan', { x: 24, y: first + LINE * i }, line));
  const label = svg('text', { class: 'name' }, ...parts);
  const ground = svg('rect', { class: 'ground', x: 0, y: y - height / 2, width, height });
  return svg('g', { 'data-peer': peer.id }, svg('title', {}, describe(peer)), ground, mark, label, ...gauges);
}

/** Arrows point from the serving peer to the pulling one. The tables of links and peers show the same in words. */
export function topology(data, width) {
  const peers = drawn(data);
  if (peers.length === 0) return nothing('No pod is registered.');
  const hasZones = peers.some((peer) => peer.zone !== '');
  const prefix = commonPrefix(data.peers.map((peer) => peer.id));
  const room = Math.max(8, Math.floor((width - 26 - GAUGE - 12 - MIN_LINKS) / CHAR));
  const names = peers.map((peer) => broken(peer.id.slice(prefix.length), room));
  const numChars = Math.max(8, ...names.flat().map((line) => line.length));
  const height = ROW + LINE * (Math.max(...names.map((lines) => lines.length)) - 1);
  const left = 26 + numChars * CHAR + GAUGE + 12;
  const [heads, places] = [[], new Map()];
  let y = 0;
  peers.forEach((peer, i) => {
    if (hasZones && (i === 0 || peer.zone !== peers[i - 1].zone)) {
      y += i === 0 ? ROW : ROW + 8;
      heads.push(svg('text', { class: 'tick', x: 0, y: y - 9 }, peer.zone === '' ? 'no zone' : shorten(peer.zone, 32)));
      heads.push(svg('line', { class: 'axis', x1: 0, x2: left - 12, y1: y - 3, y2: y - 3 }));
    }
    places.set(peer.id, y + height / 2);
    y += height;
  });
  const links = data.links.filter((one) => places.has(one.requester) && places.has(one.server));
  const most = Math.max(1, ...links.map((one) => one.num_bytes));
  const paths = links.map((one) => link(one, places.get(one.server), places.get(one.requester), left, width - left - 8, most));
  const rows = peers.map((peer, i) => row(peer, names[i], places.get(peer.id), height, numChars, left - 12));
  rows.forEach((node, i) => {
    const isOf = (one) => [one.requester, one.server].includes(peers[i].id);
    const mark = (isOn) => links.forEach((one, j) => paths[j].classList.toggle('off', isOn && !isOf(one)));
    node.addEventListener('pointerenter', () => mark(true));
    node.addEventListener('pointerleave', () => mark(false));
  });
  const arrow = { id: 'arrow', viewBox: '0 0 8 8', refX: 4, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: 'userSpaceOnUse', orient: 'auto' };
  const said = `${peers.length} pods and servers, ${links.length} links between them`;
  const drawing = svg(
    'svg',
    { width, height: y + 6, viewBox: `0 0 ${width} ${y + 6}`, role: 'img', 'aria-label': said },
    svg('defs', {}, svg('marker', arrow, svg('path', { class: 'arrow', d: 'M0 0 L8 4 L0 8z' }))),
    ...heads, ...paths, ...rows,
  );
  const more = data.num_peers > peers.length ? ` Only draining and the busiest ones are drawn; ${number(data.num_peers - peers.length)} are left out.` : '';
  const note = `Circles are pods, squares storage servers, a ring marks a drain. Bars: how full their tiers are. Arrows: the direction of the bytes.${more}`;
  return html('figure', {}, drawing, html('figcaption', {}, note));
}
