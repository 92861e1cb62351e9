// The data of the page, and where everything is: rows from the top to the bottom of the whole page in
// pixels, and times between the left and the right. The files of this folder are one script, in the
// order layout, draw, hover, input (see page.py).

const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("canvas");
const context = canvas.getContext("2d");
const tip = document.getElementById("tip");
const box = (id) => document.getElementById(id);

let LEFT = 190, RIGHT = 180;
const AXIS = 26, PAD = 12;
const TITLE = 24, LINE = 18, HEADING = 20;
const WHOLE_ROW = -1, PATH_DEPTH = 0.84, BAR = 8;
const FONT = '"DejaVu Sans", Verdana, system-ui, sans-serif';
const GREY = "#555555";

const view = { from: 0, perSecond: 1, top: 0, width: 0, height: 0 };
const mouse = { x: -1, y: -1, drag: null };
let rows = [], contentHeight = 0;

const numRanks = data.timelines.reduce(
  (sum, timeline) => sum + timeline.lanes.filter((lane) => lane.kind === "rank").length, 0);
const laneHeight = numRanks <= 8 ? 30 : numRanks <= 24 ? 22 : 16;

function layOut() {
  rows = [];
  let y = AXIS + 4;
  for (const timeline of data.timelines) {
    rows.push({ kind: "title", text: timeline.title, y, height: TITLE });
    y += TITLE;
    for (const text of timeline.lines) {
      rows.push({ kind: "line", text, y, height: LINE });
      y += LINE;
    }
    y += 5;
    let last = "rank";
    for (const lane of timeline.lanes) {
      if (lane.kind === "link" && !box("links").checked) continue;
      if (lane.kind === "memory" && !box("memory").checked) continue;
      if (lane.kind !== last) {
        const text = lane.kind === "link" ? "links" : "memory in use";
        rows.push({ kind: "heading", text, y: y + 4, height: HEADING });
        y += HEADING + 4;
        last = lane.kind;
      }
      const height = lane.kind === "rank" ? laneHeight * Math.max(1, lane.stages.length)
        : lane.kind === "link" ? 16 : Math.max(laneHeight, 24);
      rows.push({ kind: lane.kind, lane, timeline, y, height });
      y += height + (lane.kind === "link" ? 2 : 4);
    }
    y += PAD;
  }
  contentHeight = y;
}

// Time and place ------------------------------------------------------------------------------

const plotWidth = () => Math.max(50, view.width - LEFT - RIGHT);
const xOf = (seconds) => LEFT + (seconds - view.from) * view.perSecond;
const secondsAt = (x) => view.from + (x - LEFT) / view.perSecond;
const smallest = () => plotWidth() / (data.until * 1.02 || 1);

function keepInside() {
  view.perSecond = Math.min(Math.max(view.perSecond, smallest()), 5e9);
  const shown = plotWidth() / view.perSecond, margin = data.until * 0.01;
  view.from = Math.min(Math.max(view.from, -margin), data.until + margin - shown);
  if (shown >= data.until + 2 * margin) view.from = -margin;
  view.top = Math.min(Math.max(view.top, 0), Math.max(0, contentHeight - view.height));
}

function fit() {
  view.perSecond = smallest();
  view.from = -data.until * 0.01;
  redraw();
}

function zoom(factor, x) {
  const at = secondsAt(x);
  view.perSecond = Math.min(Math.max(view.perSecond * factor, smallest()), 5e9);
  view.from = at - (x - LEFT) / view.perSecond;
  redraw();
}

// The first item of a lane that ends after a time; items of a lane do not overlap.
function firstAfter(lane, seconds) {
  let low = 0, high = lane.start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.start[middle] + lane.seconds[middle] < seconds) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The last change of a memory curve up to a time; -1 before the first.
function lastUpTo(times, seconds) {
  let low = 0, high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= seconds) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
