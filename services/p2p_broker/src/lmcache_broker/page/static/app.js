import { ratioChart, sourcesChart } from './charts.js';
import { replace } from './dom.js';
import { drains, hot, misses, peers, totals } from './panels.js';
import { topology } from './topology.js';

const KEY = 'lmcache-token';
const INTERVAL_MS = 5000;
const TIMEOUT_MS = 4000;
const at = (id) => document.getElementById(id);

let data = null;
let timer = 0;
let turn = 0;

function say(text, isBad = false) {
  at('state').textContent = text;
  at('state').classList.toggle('bad', isBad);
}

async function fetched() {
  const token = sessionStorage.getItem(KEY);
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  return fetch('v1/overview', { headers, credentials: 'omit', cache: 'no-store', signal: AbortSignal.timeout(TIMEOUT_MS) });
}

function askForToken(wasWrong) {
  sessionStorage.removeItem(KEY);
  data = null;
  at('overview').hidden = at('leave').hidden = true;
  at('login').hidden = false;
  at('login-error').textContent = wasWrong ? 'The broker does not know this token.' : '';
  say('Not signed in');
  at('token').focus();
}

function render() {
  if (data === null) return;
  const room = (id) => Math.max(240, Math.floor(at(id).clientWidth));
  at('login').hidden = true;
  at('overview').hidden = false;
  at('leave').hidden = sessionStorage.getItem(KEY) === null;
  replace(at('totals'), ...totals(data));
  const draining = drains(data);
  at('drains-section').hidden = draining.length === 0;
  replace(at('drains'), ...draining);
  replace(at('topology'), topology(data, room('topology')));
  replace(at('sources'), sourcesChart(data, room('sources')));
  replace(at('ratio'), ratioChart(data, room('ratio')));
  replace(at('misses'), misses(data));
  replace(at('hot'), hot(data));
  replace(at('peers'), peers(data));
}

async function look() {
  clearTimeout(timer);
  const mine = ++turn;
  const wasShown = sessionStorage.getItem(KEY) !== null;
  try {
    const answer = await fetched();
    const body = answer.ok ? await answer.json() : null;
    if (mine !== turn) return;
    if (answer.status === 401) return askForToken(wasShown);
    if (body === null) {
      say(`The broker answered ${answer.status}${data === null ? '' : '; what is shown is older'}`, true);
    } else {
      data = body;
      render();
      say(`As of ${new Date(data.time_ms).toLocaleTimeString()}`);
      document.body.dataset.turn = String(turn);
    }
  } catch (error) {
    if (mine !== turn) return;
    if (!(error instanceof DOMException || error instanceof TypeError)) throw error;
    say(`The broker cannot be reached${data === null ? '' : '; what is shown is older'}`, true);
  }
  timer = setTimeout(look, INTERVAL_MS);
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
addEventListener('resize', render);
document.addEventListener('visibilitychange', () => {
  if (document.visibilityState === 'visible' && data !== null) look();
  else if (document.visibilityState === 'hidden') clearTimeout(timer);
});
look();
