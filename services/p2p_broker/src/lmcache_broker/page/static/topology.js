import { html, svg } from './dom.js';
import { bytes, shorten, tier } from './format.js';

const MAX_DRAWN = 32;
const LABEL_CHARS = 13;
const MARGIN_X = 92;
const MARGIN_Y = 34;

const describe = (peer) => {
  const place = [peer.zone && `zone ${peer.zone}`, peer.node && `node ${peer.node}`].filter(Boolean).join(', ');
  const tiers = (peer.figures?.tiers ?? []).map((one) => `${tier(one.name)} ${bytes(one.used_bytes)} in ${one.num_chunks} chunks`);
  return [`${peer.id}, ${peer.kind}${peer.draining ? ', draining' : ''}`, place, ...tiers].filter(Boolean).join('; ');
};

function drawn(peers) {
  const byPlace = (a, b) => [a.zone, a.node, a.id].join('\0').localeCompare([b.zone, b.node, b.id].join('\0'));
  return [...peers].sort(byPlace).slice(0, MAX_DRAWN);
}

function link(one, from, to, centre, most) {
  const thickness = 1.5 + (4.5 * Math.log1p(one.num_bytes)) / Math.log1p(most);
  const bend = ([x, y]) => [x + (centre[0] - x) * 0.45, y + (centre[1] - y) * 0.45];
  const [bx, by] = bend([(from[0] + to[0]) / 2 + (to[1] - from[1]) * 0.12, (from[1] + to[1]) / 2 - (to[0] - from[0]) * 0.12]);
  const length = Math.hypot(to[0] - bx, to[1] - by) || 1;
  const end = [to[0] - ((to[0] - bx) / length) * 15, to[1] - ((to[1] - by) / length) * 15];
  const path = `M${from.map(Math.round)} Q${Math.round(bx)},${Math.round(by)} ${end.map(Math.round)}`;
  const said = `${one.requester} pulled ${bytes(one.num_bytes)} from ${one.server}`;
  return svg('path', { class: 'link', d: path, 'stroke-width': thickness.toFixed(1), 'marker-end': 'url(#arrow)' }, svg('title', {}, said));
}

function node(peer, [x, y], centre) {
  const side = x > centre[0] + 4 ? 'start' : x < centre[0] - 4 ? 'end' : 'middle';
  const dx = side === 'start' ? 13 : side === 'end' ? -13 : 0;
  const dy = side === 'middle' ? (y < centre[1] ? -14 : 24) : 4;
  const kind = `node ${peer.kind}${peer.draining ? ' draining' : ''}`;
  const mark =
    peer.kind === 'storage'
      ? svg('rect', { class: kind, x: x - 8, y: y - 8, width: 16, height: 16 })
      : svg('circle', { class: kind, cx: x, cy: y, r: 9 });
  const said = describe(peer);
  const label = svg('text', { x: x + dx, y: y + dy, 'text-anchor': side }, shorten(peer.id, LABEL_CHARS));
  return svg('g', { tabindex: '0', role: 'img', 'aria-label': said, 'data-key': `node ${peer.id}`, 'data-peer': peer.id }, mark, label, svg('title', {}, said));
}

/** Bytes go along the arrows: from who serves to who has asked. */
export function topology(data, width) {
  const peers = drawn(data.peers);
  if (peers.length === 0) return html('p', { class: 'note' }, 'No pod is registered.');
  const height = Math.min(420, Math.max(170, width * 0.7, peers.length * 14));
  const centre = [width / 2, height / 2];
  const places = new Map();
  peers.forEach((peer, i) => {
    const angle = (2 * Math.PI * i) / peers.length - Math.PI / 2;
    places.set(peer.id, [centre[0] + Math.cos(angle) * (width / 2 - MARGIN_X), centre[1] + Math.sin(angle) * (height / 2 - MARGIN_Y)]);
  });
  const links = data.links.filter((one) => places.has(one.requester) && places.has(one.server));
  const most = Math.max(1, ...links.map((one) => one.num_bytes));
  const arrow = { id: 'arrow', viewBox: '0 0 8 8', refX: 4, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: 'userSpaceOnUse', orient: 'auto' };
  const drawing = svg(
    'svg',
    { width, height, viewBox: `0 0 ${width} ${height}`, role: 'group', 'aria-label': `${peers.length} peers and ${links.length} links between them` },
    svg('defs', {}, svg('marker', arrow, svg('path', { class: 'arrow', d: 'M0 0 L8 4 L0 8z' }))),
    ...links.map((one) => link(one, places.get(one.server), places.get(one.requester), centre, most)),
    ...peers.map((peer) => node(peer, places.get(peer.id), centre)),
  );
  const more = data.num_peers > peers.length ? ` ${data.num_peers - peers.length} more are not drawn.` : '';
  const note = `Circles are pods, squares storage servers, a ring is a pod that drains. Arrows: the way that bytes go.${more}`;
  return html('figure', {}, drawing, html('figcaption', {}, note));
}
