import { breakable, gauge, html, nothing, table } from './dom.js';
import { bytes, colour, commonPrefix, commonSuffix, hitRatio, number, percent, sum, words } from './format.js';

export function totals(data) {
  const work = data.totals;
  const ratio = hitRatio(work);
  const loaded = sum(work.loaded_chunks);
  const missed = sum(work.missed_chunks);
  const entries = [
    ['hit-ratio', 'Hit ratio', ratio ?? '', ratio === null ? '–' : percent(ratio)],
    ['requested', 'Chunks requested', work.requested_chunks, number(work.requested_chunks)],
    ['loaded', 'Chunks loaded', loaded, number(loaded)],
    ['missed', 'Chunks missed', missed, number(missed)],
    ['loaded-bytes', 'Loaded', sum(work.loaded_bytes), bytes(sum(work.loaded_bytes))],
    ['stored-bytes', 'Stored', work.stored_bytes, bytes(work.stored_bytes)],
    ['peers', 'Pods and servers', data.num_peers, number(data.num_peers)],
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
  const columns = [
    ['Reason', ([reason]) => words(reason)],
    ['Chunks', ([, count]) => number(count), true],
    ['Share', ([, count]) => html('div', { class: 'share' }, html('span', {}, percent(count / all)), gauge(count, all, 's1'))],
  ];
  return table('Chunks requested but not loaded', columns, rows, ([reason]) => reason);
}

export function hot(data) {
  if (data.hot_chunks.length === 0) return nothing('Peers have pulled nothing in the last minute.');
  const length = (one) => (one.num_tokens === null ? `${number(one.num_chunks)} chunks` : `${number(one.num_tokens)} tokens`);
  const columns = [
    ['Prompt', (one) => html('div', {}, html('div', {}, length(one)), html('code', { class: 'faint', title: one.chunk_id }, one.chunk_id.slice(0, 8)))],
    ['Pulls', (one) => number(one.num_pulls), true],
    ['Holders', (one) => number(one.num_holders), true],
    ['Model', (one) => html('span', { class: 'wrap' }, one.model ?? '–')],
  ];
  return table('Granted by this broker', columns, data.hot_chunks, (one) => one.chunk_id);
}

/** The arrows of the drawing, in words. */
export function links(data) {
  if (data.links.length === 0) return nothing('No pod has pulled from another one yet.');
  const name = namer(data);
  const columns = [['Pulled by', (one) => name(one.requester)], ['From', (one) => name(one.server)], ['Bytes', (one) => bytes(one.num_bytes), true]];
  const shown = table('Since the start of each pulling pod', columns, data.links, (one) => `${one.requester} ${one.server}`);
  return html('details', { 'data-key': 'links', 'aria-label': 'Links' }, html('summary', { 'data-key': 'links summary' }, 'Links as a table'), shown);
}

/** Names without their common prefix; the whole name is the element's title. */
export function namer({ peers }) {
  const prefix = commonPrefix(peers.map((peer) => peer.id));
  return (id) => breakable('code', id, id.startsWith(prefix) ? id.slice(prefix.length) : id);
}

function tiers(peer) {
  const found = peer.figures?.tiers ?? [];
  if (found.length === 0) return '–';
  const line = (one) => {
    const said = `${one.name}: ${bytes(one.used_bytes)}${one.capacity_bytes ? ` of ${bytes(one.capacity_bytes)}` : ''}, ${number(one.num_chunks)} chunks`;
    return html('div', {}, html('span', { 'data-tier': one.name, 'data-value': one.used_bytes }, said), one.capacity_bytes ? gauge(one.used_bytes, one.capacity_bytes, colour(one.name)) : null);
  };
  return html('div', {}, ...found.map(line));
}

const state = (peer) => (peer.draining ? (peer.drain === null ? 'draining' : `drain: ${words(peer.drain.state)}`) : 'serving');

export function peers(data) {
  if (data.peers.length === 0) return nothing('No pod is registered.');
  const name = namer(data);
  const suffix = commonSuffix(data.peers.map((peer) => peer.node).filter(Boolean));
  const node = (peer) => breakable('div', peer.node, peer.node.slice(0, peer.node.length - suffix.length));
  const alone = (peer) => (typeof peer.figures?.sole_bytes === 'number' ? bytes(peer.figures.sole_bytes) : '–');
  const loaded = (peer) => (peer.figures === null ? '–' : bytes(sum(peer.figures.loaded_bytes)));
  const columns = [
    ['Name', (peer) => name(peer.id)],
    ['State', (peer) => html('div', {}, html('div', {}, state(peer)), html('span', { class: 'faint' }, peer.kind))],
    ['Where', (peer) => html('div', { class: 'where wrap', title: peer.distributed_url }, html('div', {}, peer.zone || '–'), html('div', { class: 'faint' }, node(peer))), false, true],
    ['Tiers', tiers],
    ['Loaded', loaded, true, true],
    ['Held alone', alone, true, true],
    ['CPU load', (peer) => percent(peer.load), true, true],
    ['Serves', (peer) => number(peer.num_pulls), true, true],
  ];
  const prefix = commonPrefix(data.peers.map((peer) => peer.id));
  const count = data.num_peers > data.peers.length ? `${data.peers.length} of ${data.num_peers}` : `${data.num_peers} alive`;
  const caption = [count, prefix && `all names begin with ${prefix}`, suffix && `all nodes end in ${suffix}`].filter(Boolean).join('; ');
  return table(caption, columns, data.peers, (peer) => peer.id);
}
