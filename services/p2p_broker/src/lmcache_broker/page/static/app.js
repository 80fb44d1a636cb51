import { ratioChart, sourcesChart } from './charts.js';
import { replace } from './dom.js';
import { gains } from './gains.js';
import { drains, hot, links, misses, peers, totals } from './panels.js';
import { topology } from './topology.js';

const KEY = 'lmcache-token';
const INTERVAL_MS = 5000;
const TIMEOUT_MS = 4000;
const WIDE_TOPOLOGY = 12; // pods and servers from which it takes the whole width
const at = (id) => document.getElementById(id);
const time = (ms) => new Date(ms).toLocaleTimeString();

let data = null;
let timer = 0;
let turn = 0;
let drawnWidth = 0;

/** Show what is wrong, if anything. Screen readers announce each change, so an equal text is not set again. */
function say(text, isBad = false) {
  if (at('state').textContent !== text) at('state').textContent = text;
  at('state').classList.toggle('bad', isBad);
}

const older = () => (data === null ? '' : `; the figures are from ${time(data.time_ms)}`);

async function ask() {
  const token = sessionStorage.getItem(KEY);
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  try {
    const answer = await fetch('v1/overview', { headers, credentials: 'omit', cache: 'no-store', signal: AbortSignal.timeout(TIMEOUT_MS) });
    return { status: answer.status, body: answer.ok ? await answer.json() : null };
  } catch (error) {
    return { trouble: error instanceof SyntaxError ? 'The server that answers is not a broker' : 'The broker cannot be reached' };
  }
}

function askForToken(wasWrong) {
  sessionStorage.removeItem(KEY);
  data = null;
  at('overview').hidden = at('leave').hidden = true;
  at('overview').querySelectorAll('.filled').forEach((place) => place.replaceChildren());
  at('login').hidden = false;
  at('login-error').textContent = wasWrong ? 'The broker does not know this token.' : '';
  at('as-of').textContent = at('release').textContent = '';
  say('Not signed in');
  at('token').focus();
}

function render() {
  if (data === null) return;
  at('login').hidden = true;
  at('overview').hidden = false;
  at('leave').hidden = sessionStorage.getItem(KEY) === null;
  drawnWidth = innerWidth;
  at('overview').classList.toggle('empty', data.num_peers === 0 && data.windows.at(-1).work.requested_chunks === 0);
  at('columns').classList.toggle('wide', data.peers.length >= WIDE_TOPOLOGY);
  at('release').textContent = `${data.title && `${data.title}, `}version ${data.version}`;
  for (const link of document.querySelectorAll('a.docs')) {
    link.hidden = data.docs_url === null;
    link.href = data.docs_url ?? '';
  }
  const room = (id) => Math.max(240, Math.floor(at(id).clientWidth));
  replace(at('gains'), ...gains(data));
  replace(at('totals'), ...totals(data));
  const draining = drains(data);
  at('drains-section').hidden = draining.length === 0;
  replace(at('drains'), ...draining);
  replace(at('sources'), sourcesChart(data, room('sources')));
  replace(at('ratio'), ratioChart(data, room('ratio')));
  replace(at('misses'), misses(data));
  replace(at('topology'), topology(data, room('topology')), links(data));
  replace(at('hot'), hot(data));
  replace(at('peers'), peers(data));
}

async function look() {
  clearTimeout(timer);
  const mine = ++turn;
  const wasShown = sessionStorage.getItem(KEY) !== null;
  const { status, body, trouble } = await ask();
  if (mine !== turn) return;
  if (status === 401) {
    askForToken(wasShown);
    return;
  }
  // Before drawing, so that a failure there does not end the polling. A hidden tab asks again once it is visible.
  if (document.visibilityState !== 'hidden') timer = setTimeout(look, INTERVAL_MS);
  if (trouble !== undefined) say(trouble + older(), true);
  else if (body === null) say(`The broker answered ${status}${older()}`, true);
  else {
    data = body;
    render();
    at('as-of').textContent = `As of ${time(data.time_ms)}, reported by ${data.broker}`;
    const isAlone = data.shares && !data.is_shared;
    say(isAlone ? 'This broker cannot reach the others: it shows only what was reported to it' : '', isAlone);
    document.body.dataset.turn = String(turn);
  }
}

at('login').addEventListener('submit', (event) => {
  event.preventDefault();
  const token = at('token').value.trim();
  at('token').value = '';
  if (!/^[\x21-\x7e]+$/.test(token)) {
    at('login-error').textContent = 'A token has no spaces and no characters beyond ASCII.';
    return;
  }
  sessionStorage.setItem(KEY, token);
  look();
});
at('leave').addEventListener('click', () => {
  turn++;
  clearTimeout(timer);
  askForToken(false);
});
addEventListener('resize', () => {
  if (innerWidth !== drawnWidth) requestAnimationFrame(render);
});
document.addEventListener('visibilitychange', () => {
  if (document.visibilityState === 'hidden') clearTimeout(timer);
  else if (at('login').hidden) look();
});
look();
