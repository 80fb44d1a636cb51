import { gauge, html, nothing, table } from './dom.js';
import { bytes, colour, hitRatio, number, percent, sum, tier, words } from './format.js';

export function totals(data) {
  const work = data.totals;
  const ratio = hitRatio(work);
  const loaded = sum(work.loaded_chunks);
  const missed = sum(work.missed_chunks);
  const entries = [
    ['hit-ratio', 'Hit ratio', ratio ?? '', ratio === null ? '–' : percent(ratio)],
    ['requested', 'Chunks wanted', work.requested_chunks, number(work.requested_chunks)],
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
  return table('Chunks wanted and not handed out', columns, rows, ([reason]) => reason);
}

export function hot(data) {
  if (data.hot_chunks.length === 0) return nothing('Peers have pulled nothing in the last minute.');
  const columns = [['Prefix, by its hash', (one) => html('code', {}, one.chunk_id)], ['Pulls', (one) => number(one.num_pulls), true]];
  return table('Granted by this broker', columns, data.hot_chunks, (one) => one.chunk_id);
}

/** The arrows of the drawing, in words. */
export function links(data) {
  if (data.links.length === 0) return nothing('No pod has pulled from another one yet.');
  const columns = [['Pulled by', (one) => html('code', {}, one.requester)], ['From', (one) => html('code', {}, one.server)], ['Bytes', (one) => bytes(one.num_bytes), true]];
  const shown = table('Since the start of who pulled', columns, data.links, (one) => `${one.requester} ${one.server}`);
  return html('details', { 'data-key': 'links', 'aria-label': 'Links' }, html('summary', { 'data-key': 'links summary' }, 'Links as a table'), shown);
}

function tiers(peer) {
  const found = peer.figures?.tiers ?? [];
  if (found.length === 0) return '–';
  const line = (one) => {
    const said = `${tier(one.name)}: ${bytes(one.used_bytes)}${one.capacity_bytes ? ` of ${bytes(one.capacity_bytes)}` : ''}, ${number(one.num_chunks)} chunks`;
    return html('div', {}, html('span', { 'data-tier': one.name, 'data-value': one.used_bytes }, said), one.capacity_bytes ? gauge(one.used_bytes, one.capacity_bytes, colour(one.name)) : null);
  };
  return html('div', {}, ...found.map(line));
}

const state = (peer) => (peer.draining ? (peer.drain === null ? 'draining' : `drain: ${words(peer.drain.state)}`) : 'serving');

export function peers(data) {
  if (data.peers.length === 0) return nothing('No pod is registered.');
  const alone = (peer) => (typeof peer.figures?.sole_bytes === 'number' ? bytes(peer.figures.sole_bytes) : '–');
  const loaded = (peer) => (peer.figures === null ? '–' : bytes(sum(peer.figures.loaded_bytes)));
  const columns = [
    ['Name', (peer) => html('code', {}, peer.id)],
    ['State', (peer) => html('div', {}, html('div', {}, state(peer)), html('span', { class: 'faint' }, peer.kind))],
    ['Where', (peer) => html('div', {}, html('div', {}, [peer.zone, peer.node].filter(Boolean).join(', ')), html('code', {}, peer.distributed_url))],
    ['Tiers', tiers],
    ['Loaded', loaded, true],
    ['Held alone', alone, true],
    ['Load', (peer) => percent(peer.load), true],
    ['Serves', (peer) => number(peer.num_pulls), true],
  ];
  const caption = data.num_peers > data.peers.length ? `${data.peers.length} of ${data.num_peers}` : `${data.num_peers} alive`;
  return table(caption, columns, data.peers, (peer) => peer.id);
}
