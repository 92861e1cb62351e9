// What is under the mouse, and what the tip says about it.

function rowAt(y) {
  return rows.find((row) => y + view.top >= row.y && y + view.top <= row.y + row.height);
}

function itemAt(row, x, y) {
  if (!row || !row.lane || row.kind === "memory" || x < LEFT || x > LEFT + plotWidth()) return -1;
  const { lane } = row;
  let best = -1, distance = 3;
  for (let i = firstAfter(lane, secondsAt(x - 4)); i < lane.start.length; i++) {
    const left = xOf(lane.start[i]), right = left + lane.seconds[i] * view.perSecond;
    if (left > x + 4) break;
    if (lane.seconds[i] === 0) continue;
    const [top, height] = barOf(row, i, row.y - view.top);
    const away = Math.max(left - x, x - right, 0);
    if (y < top || y > top + height || away > distance) continue;
    if (best < 0 || away < distance) { best = i; distance = away; }
  }
  return best;
}

function lines(row, x, y) {
  const { lane, timeline } = row;
  if (row.kind === "memory") return memoryLines(lane, timeline, x);
  const i = itemAt(row, x, y);
  if (i < 0) return x < LEFT ? stageLines(row, y) : null;
  const name = data.texts[lane.name[i]], what = data.texts[lane.what[i]];
  const found = [name.startsWith(what) ? name : `${what}: ${name}`];
  const stage = lane.stage[i];
  if (stage !== null && stage >= 0) {
    const { title, label } = timeline.stages[stage];
    found.push(label ? `${title}: ${label}` : title);
  };
  if (stage === -1) found.push("the feed (your step before the forward)");
  if (lane.microbatch[i] !== null) {
    found.push(`micro-batch ${lane.microbatch[i]}`);
    const operators = stage >= 0 ? timeline.stages[stage].operators : "";
    if (operators) found.push(`operators: ${operators}`);
  }
  found.push(`from ${exact(lane.start[i])} to ${exact(lane.start[i] + lane.seconds[i])}`);
  found.push(`takes ${exact(lane.seconds[i])}`);
  if (lane.bytes[i] !== null) found.push(bytesText(lane.bytes[i]));
  if (lane.critical[i]) found.push("on the critical path");
  return found;
}

function stageLines(row, y) {
  if (row.kind !== "rank") return [row.lane.label];
  const number = Math.floor((y + view.top - row.y) / row.height * row.lane.stages.length);
  const stage = row.timeline.stages[row.lane.stages[number]];
  if (!stage) return [row.lane.label];
  const found = [`${row.lane.label}, ${stage.title} ${stage.label}`];
  if (stage.operators) found.push(`operators: ${stage.operators}`);
  return found;
}

function memoryLines(lane, timeline, x) {
  const found = [`memory of ${lane.label}`, lane.note], at = secondsAt(x);
  const i = lastUpTo(lane.times, at);
  if (x >= LEFT && i >= 0 && at <= timeline.step) {
    found.push(`${bytesText(lane.bytes[i])} at ${exact(at)}`);
  }
  return found;
}

function exact(seconds) {
  const size = Math.abs(seconds);
  const [unit, name] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${Number((seconds / unit).toPrecision(5))} ${name}`;
}

function bytesText(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = bytes, number = 0;
  while (value >= 1000 && number < units.length - 1) { value /= 1000; number++; }
  return `${Number(value.toPrecision(4))} ${units[number]}`;
}

function hover() {
  const row = mouse.y > AXIS ? rowAt(mouse.y) : null;
  const found = row && row.lane && !mouse.drag ? lines(row, mouse.x, mouse.y) : null;
  tip.hidden = !found;
  if (!found) return;
  tip.textContent = found.join("\n").slice(0, 1500);
  const width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = `${Math.max(4, Math.min(mouse.x + 14, view.width - width - 4))}px`;
  const below = mouse.y + 16 + height < view.height;
  tip.style.top = `${Math.max(4, below ? mouse.y + 16 : mouse.y - height - 10)}px`;
}
