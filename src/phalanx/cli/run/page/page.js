"use strict";
// Draws what the launcher sends. Texts are set as texts, never as markup: they are the user's own file names.
const $ = (id) => document.getElementById(id);
const style = getComputedStyle(document.documentElement);
const colour = (name) => style.getPropertyValue("--" + name).trim();
let latest = null;

function units(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024 || unit === "GiB") return (unit === "B" || count >= 100 ? count.toFixed(0) : count.toFixed(1)) + " " + unit;
    count /= 1024;
  }
}
const percent = (share) => Math.round(100 * share) + " %";
const seconds = (value) => value >= 10 ? value.toFixed(0) + " s" : value >= 1 ? value.toFixed(1) + " s" : (1000 * value).toFixed(value < 0.01 ? 1 : 0) + " ms";

function cell(row, text, kind) {
  const made = row.insertCell();
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function table(id, heads) {
  const made = $(id);
  made.replaceChildren();
  const row = made.createTHead().insertRow();
  for (const head of heads) {
    const th = document.createElement("th");
    th.textContent = head.replace(/^>/, "");
    if (head.startsWith(">")) th.className = "number";
    row.append(th);
  }
  return made.createTBody();
}

function bar(target, waiting, moving) {
  const made = document.createElement("span");
  made.className = "bar";
  for (const [kind, share] of [["waiting", waiting], ["moving", moving]]) {
    const part = document.createElement("i");
    part.className = kind;
    part.style.width = 100 * share + "%";
    made.append(part);
  }
  target.append(made);
  target.title = "waiting " + percent(waiting) + ", moving data " + percent(moving);
}

function findings(picture) {
  const list = $("findings");
  list.replaceChildren();
  const add = (kind, text) => {
    const item = document.createElement("li");
    item.className = kind;
    item.textContent = text;
    list.append(item);
  };
  for (const found of picture.findings) add(found.kind, found.text);
  if (!picture.findings.length) {
    const [words, well] = picture.calm;
    add(well ? "calm" : "unsure", words[0].toUpperCase() + words.slice(1) + ".");
  }
}

function ranks(picture) {
  const blamed = new Set(picture.findings.filter((f) => f.kind !== "link").flatMap((f) => f.ranks));
  const body = table("ranks", [">rank", "does", "at", ">since", "waits for", "time", ">bytes/s", ">operations/s", ">memory", "host"]);
  for (const rank of picture.ranks) {
    const row = body.insertRow();
    if (blamed.has(rank.rank)) row.className = "blamed";
    else if (rank.waits_for.length) row.className = "waits";
    cell(row, rank.rank, "number");
    cell(row, (rank.state === "running" ? "" : rank.state + " ") + (rank.operation || (rank.state === "running" ? "no operation" : "")));
    cell(row, rank.line, "place");
    cell(row, seconds(rank.seconds), "number");
    cell(row, rank.waits_for.slice(0, 6).join(", ") + (rank.waits_for.length > 6 ? ", …" : ""));
    bar(cell(row, ""), rank.waiting, rank.moving);
    cell(row, units(rank.bytes_per_second), "number");
    cell(row, rank.operations_per_second.toFixed(0), "number");
    cell(row, units(rank.memory), "number");
    cell(row, rank.host);
  }
}

function sites(picture) {
  const body = table("sites", ["call site", ">calls", ">bytes", ">time", ">of it waiting", "came last most", ">late by"]);
  for (const site of picture.sites) {
    const row = body.insertRow();
    cell(row, site.verb + " at " + site.where, "place").title = site.file;
    cell(row, site.count, "number");
    cell(row, units(site.bytes), "number");
    cell(row, seconds(site.seconds), "number");
    cell(row, site.seconds ? percent(Math.min(1, site.waiting / site.seconds)) : "", "number");
    cell(row, site.last >= 0 ? "rank " + site.last + " (" + percent(site.often) + ")" : "");
    cell(row, site.last >= 0 ? seconds(site.late) : "", "number");
  }
}

function links(picture) {
  const busy = picture.links.filter((link) => link.bytes_per_second > 1e4);
  $("links-section").hidden = !busy.length;
  const body = table("links", ["link", ">bytes/s", ">busy", ">while busy", ">round trip", ">sent again"]);
  for (const link of busy.sort((a, b) => b.busy - a.busy).slice(0, 16)) {
    const row = body.insertRow();
    cell(row, link.source + " → " + link.target);
    cell(row, units(link.bytes_per_second), "number");
    cell(row, percent(link.busy), "number");
    cell(row, units(link.rate) + "/s", "number");
    cell(row, seconds(link.round_trip), "number");
    cell(row, link.lost, "number");
  }
}

// The waits that are over, and those that are not: a hang is one that may never be.
function waitsUntilNow(picture) {
  const found = picture.waits.map((row) => row.slice());
  for (const rank of picture.ranks)
    for (const other of rank.waits_for)
      if (found[rank.rank]?.[other] !== undefined) found[rank.rank][other] += rank.seconds;
  return found;
}

function matrix(picture) {
  const waits = waitsUntilNow(picture);
  const size = Math.min(picture.waits.length, 32); // of a part of the world, if only that is seen
  const body = table("matrix", ["", ...Array.from({ length: size }, (_, i) => ">" + i)]);
  const most = Math.max(0.1, ...waits.flat());
  for (let i = 0; i < size; i++) {
    const row = body.insertRow();
    const head = document.createElement("th");
    head.textContent = i;
    row.append(head);
    for (let j = 0; j < size; j++) {
      const value = waits[i][j];
      const made = cell(row, i === j ? "" : value >= 0.01 ? value.toFixed(2) : "·");
      made.style.background = i === j ? "" : `color-mix(in srgb, ${colour("waiting")} ${Math.round(85 * value / most)}%, transparent)`;
      made.title = "rank " + i + " has waited " + seconds(value) + " for rank " + j;
    }
  }
}

function canvas(id, height) {
  const made = $(id), scale = window.devicePixelRatio || 1, width = made.clientWidth;
  if (height) made.style.height = height + "px";
  made.width = width * scale;
  made.height = (height || made.clientHeight) * scale;
  const draw = made.getContext("2d");
  draw.scale(scale, scale);
  draw.clearRect(0, 0, width, height || made.clientHeight);
  return [draw, width, height || made.clientHeight];
}

const LEFT = 56, ROW = 22;
function timeline(picture) {
  $("span").textContent = picture.span;
  const count = Math.min(picture.world_size, 32);
  const [draw, width] = canvas("timeline", count * ROW + 22);
  const begin = picture.now - picture.span, x = (at) => LEFT + (width - LEFT) * Math.max(0, at - begin) / picture.span;
  draw.font = "12px system-ui";
  for (let rank = 0; rank < count; rank++) {
    draw.fillStyle = colour("dim");
    draw.fillText("rank " + rank, 0, rank * ROW + 15);
    draw.fillStyle = colour("compute");
    draw.fillRect(x(picture.began), rank * ROW + 3, width - x(picture.began), ROW - 6);
  }
  const part = (rank, from, to, kind) => {
    if (to <= begin || rank >= count) return;
    draw.fillStyle = colour(kind);
    draw.fillRect(x(from), rank * ROW + 3, Math.max(0.7, x(to) - x(from)), ROW - 6);
  };
  for (const op of picture.timeline) {
    op.ranks.forEach((rank, i) => {
      const met = Math.min(Math.max(op.met, op.began[i]), op.ended[i]);
      part(rank, op.began[i], met, "waiting");
      part(rank, met, op.ended[i], "moving");
    });
    const late = op.met - Math.min(...op.began);
    if (late > picture.span / 1000) part(op.last, op.met, op.met + picture.span / 900, "late");
  }
  for (const rank of picture.ranks) {
    if (rank.operation && rank.state !== "closed") part(rank.rank, picture.now - rank.seconds, picture.now, rank.waits_for.length ? "waiting" : "moving");
  }
  draw.fillStyle = colour("dim");
  for (let s = 0; s <= picture.span; s += 2) draw.fillText(s === picture.span ? "" : "−" + (picture.span - s) + " s", x(begin + s), count * ROW + 16);
}

function line(id, points, at, text) {
  const [draw, width, height] = canvas(id);
  const most = Math.max(1, ...points.map((p) => p[at]));
  draw.strokeStyle = colour("moving");
  draw.fillStyle = colour("moving");
  draw.lineWidth = 1.5;
  draw.beginPath();
  points.forEach((p, i) => draw.lineTo(points.length < 2 ? 0 : i * width / (points.length - 1), height - 4 - (height - 18) * p[at] / most));
  draw.stroke();
  draw.fillStyle = colour("dim");
  draw.font = "11px system-ui";
  draw.fillText(text(most), 0, 11);
}

$("timeline").addEventListener("mousemove", (event) => {
  if (!latest) return;
  const at = latest.now - latest.span + latest.span * (event.offsetX - LEFT) / (event.target.clientWidth - LEFT);
  const rank = Math.floor(event.offsetY / ROW);
  const found = latest.timeline.find((op) => {
    const i = op.ranks.indexOf(rank);
    return i >= 0 && op.began[i] <= at && at <= op.ended[i];
  });
  if (!found) { $("hint").textContent = ""; return; }
  const i = found.ranks.indexOf(rank);
  $("hint").textContent = "rank " + rank + ": " + found.what + ", #" + found.number + ": waited " + seconds(Math.max(0, found.met - found.began[i])) +
    " for rank " + found.last + ", then " + seconds(Math.max(0, found.ended[i] - Math.max(found.met, found.began[i])));
});

function show(picture) {
  latest = picture;
  const script = picture.program.split(" ")[0].split("/").pop();
  document.title = (picture.findings.length ? "● " : "") + script;
  $("program").textContent = script || "a job";
  const seen = picture.ranks.length === picture.world_size ? picture.world_size : picture.ranks.length + " of " + picture.world_size;
  $("about").textContent = "job " + picture.job + ", " + seen + " ranks, " + seconds(picture.elapsed) + (picture.clock_error ? ", clocks within " + seconds(picture.clock_error) : "");
  findings(picture); ranks(picture); timeline(picture); matrix(picture); sites(picture); links(picture);
  const last = picture.history[picture.history.length - 1];
  $("throughput-now").textContent = units(last[1]) + "/s, all ranks";
  $("memory-now").textContent = units(last[2]) + ", all ranks";
  line("throughput", picture.history, 1, (most) => units(most) + "/s");
  line("memory", picture.history, 2, units);
}

// Above all findings: that what follows is not the present.
function notice(text) {
  for (const old of $("findings").querySelectorAll(".calm, .ended")) old.remove();
  const item = document.createElement("li");
  item.className = "ended";
  item.textContent = text;
  $("findings").prepend(item);
}

const waits = (picture) => picture && picture.findings.some((one) => one.kind === "blocked" || one.kind === "mismatch");
const SILENCE = 10000;
let heard = 0, lively = null;
const events = new EventSource("events");
events.onmessage = (event) => {
  const picture = JSON.parse(event.data);
  heard = Date.now();
  if (!picture) return;
  show(picture);
  // While the ranks are being ended, who waits for whom is lost bit by bit.
  const whole = picture.ranks.every((rank) => ["running", "stopped", "silent"].includes(rank.state));
  if (picture.running && (whole || !waits(lively))) lively = picture;
};
events.addEventListener("end", (event) => {
  events.close();
  clearInterval(silence);
  const failed = JSON.parse(event.data).failed;
  if (failed && waits(lively) && !waits(latest)) findings(lively); // who waited for whom before it was ended
  notice((failed ? "The job has failed: " + failed + "." : "The job has ended.") + " This is what was seen last.");
});
const silent = () => notice("The launcher does not answer. This is what was seen last.");
// The browser tries again by itself, unless it was refused: then there is a reason to read.
events.onerror = () => {
  if (events.readyState !== EventSource.CLOSED) { silent(); return; }
  clearInterval(silence);
  fetch("events").then((answer) => {
    if (!answer.ok) return answer.text().then(notice);
    answer.body.cancel();
    silent();
  }, silent);
};
const silence = setInterval(() => { if (latest && Date.now() - heard > SILENCE) silent(); }, 1000);
window.addEventListener("resize", () => latest && show(latest));
