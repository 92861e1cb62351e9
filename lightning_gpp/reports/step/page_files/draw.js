// Draws the page on its canvas: only what is visible, at most once per frame.

const STYLES = {
  title: ["bold 15px", "#111111"], line: ["12px", GREY], heading: ["bold 12px", GREY],
};

let isAsked = false;
function redraw() {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => { isAsked = false; draw(); });
}

function draw() {
  keepInside();
  context.clearRect(0, 0, view.width, view.height);
  context.textBaseline = "middle";
  for (const row of rows) {
    const y = row.y - view.top;
    if (y + row.height < AXIS || y > view.height) continue;
    if (row.lane) drawLane(row, y);
  }
  if (box("path").checked) drawPaths();
  drawGrid();
  for (const row of rows) {
    if (!row.lane) write(row.text, 12, row.y - view.top + row.height / 2, ...STYLES[row.kind]);
  }
  drawAxis();
  drawScrollBar();
}

function write(text, x, y, font, colour, align = "left", most = Infinity) {
  context.font = `${font} ${FONT}`;
  context.fillStyle = colour;
  context.textAlign = align;
  context.fillText(clip(text, most), x, y);
}

function clip(text, most) {
  if (most === Infinity || context.measureText(text).width <= most) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(text.slice(0, middle) + "…").width <= most) low = middle;
    else high = middle - 1;
  }
  return low ? text.slice(0, low) + "…" : "";
}

function inPlot(paint) {
  context.save();
  context.beginPath();
  context.rect(LEFT, AXIS, plotWidth(), view.height - AXIS);
  context.clip();
  paint();
  context.restore();
}

function drawLane(row, y) {
  const { lane, timeline, height } = row, middle = y + height / 2;
  const size = Math.min(12, Math.max(9, laneHeight * 0.6));
  if (lane.kind === "rank") {
    write(lane.label, 12, middle, `${size}px`, "#111111", "left", 70);
    lane.stages.forEach((stage, number) => {
      const at = y + (number + 0.5) * height / lane.stages.length;
      write(timeline.stages[stage].title, LEFT - 8, at, `${Math.min(size, 11)}px`, GREY, "right", 100);
    });
  } else {
    write(lane.label, 12, middle, `${Math.min(size, 11)}px`, "#111111", "left", LEFT - 20);
  }
  if (RIGHT > 100) {
    const x = view.width - RIGHT + 10;
    write(lane.note, x, middle, `${Math.min(size, 11)}px`, "#111111", "left", RIGHT - 24);
  }
  inPlot(() => {
    context.fillStyle = data.colours.idle;
    fillBar(xOf(0), y, timeline.step * view.perSecond, height);
    if (lane.kind === "memory") drawMemory(row, y);
    else drawItems(row, y);
  });
}

// Only what may be seen: canvases get slow and wrong with coordinates far outside.
function fillBar(x, y, width, height) {
  const from = Math.max(x, LEFT - 50), to = Math.min(x + width, LEFT + plotWidth() + 50);
  if (to > from) context.fillRect(from, y, to - from, height);
}

function barOf(row, index, y) {
  const { lane, height } = row, sub = lane.sub ? lane.sub[index] : WHOLE_ROW;
  if (sub === WHOLE_ROW) return [y, height];
  const part = height / Math.max(1, lane.stages.length);
  return [y + sub * part, part];
}

function drawItems(row, y) {
  const { lane } = row, right = LEFT + plotWidth(), until = secondsAt(right);
  const dim = box("dim").checked, covered = new Map();
  for (let i = firstAfter(lane, view.from); i < lane.start.length; i++) {
    if (lane.start[i] > until) break;
    if (lane.seconds[i] === 0) continue;  // a send that costs the rank nothing
    const x = xOf(lane.start[i]), width = lane.seconds[i] * view.perSecond;
    const [top, height] = barOf(row, i, y);
    if (width < 1) {  // bars thinner than a pixel: one per pixel
      const pixel = Math.floor(x), sub = lane.sub ? lane.sub[i] : WHOLE_ROW;
      if (covered.get(sub) === pixel) continue;
      covered.set(sub, pixel);
    }
    const paint = data.paints[lane.paint[i]];
    context.globalAlpha = dim && !lane.critical[i] ? 0.25 : 1;
    context.fillStyle = paint.colour;
    fillBar(x, top, Math.max(width > 3 ? width - 0.5 : width, 0.6), height);
    context.globalAlpha = 1;
    if (lane.kind === "link" && lane.critical[i] && box("path").checked) {
      context.fillStyle = data.colours.path;
      fillBar(x, top + height - 3, Math.max(width, 0.6), 3);
    }
    if (width > 14) drawText(row, i, Math.max(x, LEFT), Math.min(x + width, right), top, height);
  }
}

function drawText(row, i, left, right, top, height) {
  const { lane } = row, room = right - left - 4;
  const paint = data.paints[lane.paint[i]], number = lane.microbatch[i];
  const size = Math.min(11, height - 3);
  if (size < 8 || room < 6) return;
  let text = number === null ? data.texts[lane.what[i]] : data.texts[lane.name[i]];
  if (lane.kind === "link") text = data.texts[lane.name[i]];
  context.font = `${size}px ${FONT}`;
  if (context.measureText(text).width > room && number !== null) text = String(number);
  if (context.measureText(text).width > room) return;
  const isDim = box("dim").checked && !lane.critical[i];
  const colour = isDim ? GREY : paint.text;
  write(text, (left + right) / 2, top + height * 0.44, `${size}px`, colour, "center");
}

function drawMemory(row, y) {
  const { lane, timeline, height } = row, full = fullBytes(timeline);
  const limit = lane.limit === null ? Infinity : lane.limit;
  const until = Math.min(secondsAt(LEFT + plotWidth()), timeline.step);
  const level = (bytes) => y + height * (1 - bytes / full);
  for (let i = Math.max(0, lastUpTo(lane.times, view.from)); i < lane.times.length; i++) {
    if (lane.times[i] > until) break;
    const end = i + 1 < lane.times.length ? lane.times[i + 1] : timeline.step;
    const x = xOf(lane.times[i]), width = Math.max((end - lane.times[i]) * view.perSecond, 0.3);
    context.fillStyle = data.colours.memory;
    const used = Math.min(lane.bytes[i], limit);
    fillBar(x, level(used), width, y + height - level(used));
    if (lane.bytes[i] > limit) {
      context.fillStyle = data.colours.above;
      fillBar(x, level(lane.bytes[i]), width, level(limit) - level(lane.bytes[i]));
    }
  }
  if (limit <= full) {
    context.fillStyle = "#111111";
    fillBar(xOf(0), level(limit), timeline.step * view.perSecond, 1);
  }
}

// All memory of a timeline is on one scale; limits that are far away are only named.
function fullBytes(timeline) {
  if (timeline.full === undefined) {
    const lanes = timeline.lanes.filter((lane) => lane.kind === "memory");
    const peak = lanes.reduce(
      (most, lane) => lane.bytes.reduce((a, b) => Math.max(a, b), most), 1);
    const limits = lanes.map((lane) => lane.limit).filter((limit) => limit && limit <= 2 * peak);
    timeline.full = 1.04 * Math.max(peak, ...limits);
  }
  return timeline.full;
}

// Thick along what the critical path goes through, thin from rank to rank.
function drawPaths() {
  const thick = laneHeight >= 22 ? 2.6 : 1.8;
  for (const timeline of data.timelines) {
    const places = new Map();
    for (const row of rows) {
      if (row.kind === "rank" && row.timeline === timeline) places.set(row.lane.label, row);
    }
    const along = timeline.path.map(([start, end, rank, sub]) => {
      const row = places.get(`rank ${rank}`);
      const part = sub === WHOLE_ROW ? row.height : row.height / row.lane.stages.length;
      const y = row.y - view.top + (sub === WHOLE_ROW ? 0 : sub * part) + PATH_DEPTH * part;
      return [[xOf(start), y], [xOf(end), y]];
    });
    const between = along.slice(1).map((piece, i) => [along[i][1], piece[0]]);
    const jumps = between.filter(([from, to]) => from[0] !== to[0] || from[1] !== to[1]);
    inPlot(() => {
      strokePieces(jumps, laneHeight >= 22 ? data.colours.path : "#00000099", thick / 2);
      strokePieces(along, "#ffffff", thick + 1.6);
      strokePieces(along, data.colours.path, thick);
    });
  }
}

function strokePieces(pieces, colour, width) {
  const left = LEFT - 50, right = LEFT + plotWidth() + 50;
  const within = (x) => Math.min(Math.max(x, left), right);
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.beginPath();
  for (const [[x, y], [nextX, nextY]] of pieces) {
    if (nextX < left || x > right) continue;
    context.moveTo(within(x), y);
    context.lineTo(within(nextX), nextY);
  }
  context.stroke();
}

function ticks() {
  const step = tickStep(), found = [];
  for (let n = Math.ceil(view.from / step); xOf(n * step) <= LEFT + plotWidth(); n++) {
    found.push(n * step);
  }
  return found;
}

function drawGrid() {
  context.fillStyle = "#00000018";
  for (const seconds of ticks()) context.fillRect(xOf(seconds), AXIS, 1, view.height - AXIS);
  if (mouse.x >= LEFT && mouse.x <= LEFT + plotWidth() && mouse.y > 0 && !mouse.drag) {
    context.fillStyle = "#00000066";
    context.fillRect(mouse.x, AXIS, 1, view.height - AXIS);
  }
  context.fillStyle = "#ffffff";
  for (const row of rows) {
    if (!row.lane) context.fillRect(0, row.y - view.top, view.width, row.height);
  }
}

function drawAxis() {
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, view.width, AXIS);
  const step = tickStep();
  for (const seconds of ticks()) {
    write(timeText(seconds, step), xOf(seconds), AXIS / 2, "11px", GREY, "center");
  }
  context.fillStyle = "#111111";
  context.fillRect(LEFT, AXIS - 1, plotWidth(), 1);
}

// 1, 2 or 5 times a power of ten, about 110 pixels wide.
function tickStep() {
  const wanted = 110 / view.perSecond, power = 10 ** Math.floor(Math.log10(wanted));
  return power * ([1, 2, 5].find((factor) => factor * power >= wanted) || 10);
}

function timeText(seconds, step) {
  const [size, unit] = data.until >= 10 ? [1, "s"] : data.until >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  const digits = Math.min(9, Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9)));
  return `${(seconds / size).toFixed(digits)} ${unit}`;
}

function drawScrollBar() {
  if (contentHeight <= view.height) return;
  const share = view.height / contentHeight;
  context.fillStyle = "#00000033";
  context.fillRect(view.width - BAR, view.top * share, BAR - 2, view.height * share);
}
