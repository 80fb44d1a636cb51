import { html, table } from './dom.js';
import { bytes, hitRatio, number, percent, sum, tier, words } from './format.js';

const nothing = (text) => html('p', { class: 'note' }, text);

export function totals(data) {
  const work = data.totals;
  const ratio = hitRatio(work);
  const loaded = sum(work.loaded_chunks);
  const entries = [
    ['peers', 'Pods and servers', data.num_peers, number(data.num_peers)],
    ['hit-ratio', 'Hit ratio', ratio ?? '', ratio === null ? '–' : percent(ratio)],
    ['requested', 'Chunks wanted', work.requested_chunks, number(work.requested_chunks)],
    ['loaded', 'Chunks loaded', loaded, number(loaded)],
    ['loaded-bytes', 'Bytes loaded', sum(work.loaded_bytes), bytes(sum(work.loaded_bytes))],
    ['missed', 'Chunks missed', sum(work.missed_chunks), number(sum(work.missed_chunks))],
    ['stored-bytes', 'Bytes stored', work.stored_bytes, bytes(work.stored_bytes)],
  ];
  return entries.map(([key, title, value, shown]) => html('div', {}, html('dt', {}, title), html('dd', { 'data-total': key, 'data-value': value }, shown)));
}

export function drains(data) {
  return data.peers.filter((peer) => peer.draining).map((peer) => {
    const drain = peer.drain;
    if (drain === null) return html('p', { 'data-drain': peer.id }, html('strong', {}, peer.id), ' gets no new pulls; its drain has not begun.');
    const done = drain.total - drain.left;
    const said = `${words(drain.state)}: ${number(done)} of ${number(drain.total)} chunks settled, ${number(drain.handed_over)} handed over, ` +
      `${number(drain.already_elsewhere)} were elsewhere, ${number(drain.failed)} failed`;
    const bar = html('progress', { max: Math.max(1, drain.total), value: drain.total === 0 ? 1 : done, 'aria-label': `Drain of ${peer.id}` });
    return html('div', { 'data-drain': peer.id }, html('p', { class: 'note' }, html('strong', {}, peer.id), ` ${said}`), bar);
  });
}

export function misses(data) {
  const rows = Object.entries(data.totals.missed_chunks).sort((a, b) => b[1] - a[1]);
  if (rows.length === 0) return nothing('None.');
  const all = sum(data.totals.missed_chunks);
  const share = ([reason, count]) => html('meter', { min: 0, max: all, value: count, 'aria-label': `${words(reason)}: ${percent(count / all)}` });
  const columns = [['Reason', ([reason]) => words(reason)], ['Chunks', ([, count]) => number(count), true], ['Share', share]];
  return table('Chunks wanted and not handed out', columns, rows, ([reason]) => reason);
}

export function hot(data) {
  if (data.hot_chunks.length === 0) return nothing('Peers have pulled nothing in the last minute.');
  const columns = [['Prefix, by its hash', (one) => html('code', {}, one.chunk_id)], ['Pulls', (one) => number(one.num_pulls), true]];
  return table('Granted by this broker', columns, data.hot_chunks, (one) => one.chunk_id);
}

function tiers(peer) {
  const found = peer.figures?.tiers ?? [];
  if (found.length === 0) return '–';
  return html('span', {}, ...found.flatMap((one, i) => {
    const said = `${tier(one.name)}: ${bytes(one.used_bytes)}${one.capacity_bytes ? ` of ${bytes(one.capacity_bytes)}` : ''}, ${number(one.num_chunks)} chunks`;
    const room = one.capacity_bytes ? html('meter', { min: 0, max: one.capacity_bytes, value: one.used_bytes, 'aria-label': said }) : null;
    return [i ? html('br') : null, html('span', { 'data-tier': one.name, 'data-value': one.used_bytes }, said), room];
  }));
}

export function peers(data) {
  if (data.peers.length === 0) return nothing('No pod is registered.');
  const alone = (peer) => (typeof peer.figures?.sole_bytes === 'number' ? bytes(peer.figures.sole_bytes) : '–');
  const loaded = (peer) => (peer.figures === null ? '–' : bytes(sum(peer.figures.loaded_bytes)));
  const columns = [
    ['Name', (peer) => html('code', {}, peer.id)],
    ['Kind', (peer) => peer.kind],
    ['State', (peer) => (peer.draining ? (peer.drain === null ? 'draining' : words(peer.drain.state)) : 'serving')],
    ['Zone, node', (peer) => [peer.zone, peer.node].filter(Boolean).join(', ') || '–'],
    ['Tiers', tiers],
    ['Loaded', loaded, true],
    ['Held alone', alone, true],
    ['Load', (peer) => percent(peer.load), true],
    ['Serves', (peer) => number(peer.num_pulls), true],
    ['At', (peer) => html('code', {}, peer.distributed_url)],
  ];
  const caption = data.num_peers > data.peers.length ? `${data.peers.length} of ${data.num_peers}` : `${data.num_peers} alive`;
  return table(caption, columns, data.peers, (peer) => peer.id);
}
